"""Functions that the tests run in other processes, which import this module."""

import fcntl
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

import hpcdist_stores as stores

SOON = timedelta(seconds=30)


def file_counter(path, is_ours, count, world_size):
    store = (stores if is_ours else dist).FileStore(path, world_size)
    store.add("came", 1)
    while int(store.get("came")) < world_size:
        time.sleep(0.005)
    totals = [store.add("n", 1) for _ in range(count)]
    store.add("done", 1)
    while int(store.get("done")) < world_size:
        time.sleep(0.005)
    # one after the other: torch's store leaves in two steps, and of two that leave at once neither may be the last
    # (8 users of torch's left the file in 10 of 300 runs)
    with open(f"{path}.leaving", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        del store
    return totals


def file_meet(path, rank, world_size):
    store = stores.FileStore(path, world_size)
    store.set_timeout(SOON)
    store.set(f"rank{rank}", str(rank))
    values = store.multi_get([f"rank{i}" for i in range(world_size)])
    store.barrier("end", world_size)
    return values


def file_writer(path):
    store = stores.FileStore(path)
    store.set("going", "1")
    while True:
        store.set("large", b"y" * 3_000_000)


def file_die(path, world_size, is_ours):
    store = (stores if is_ours else dist).FileStore(path, world_size)
    store.set("k", "old run")
    os.kill(os.getpid(), signal.SIGKILL)


def tcp(port, is_ours, secret=None, use_libuv=True):
    if is_ours:
        return stores.TCPStore("127.0.0.1", port, None, False, SOON, secret=secret)
    return dist.TCPStore("127.0.0.1", port, None, False, SOON, use_libuv=use_libuv)


def tcp_work(port, is_ours, rank, world_size, count):
    """Count, compare-and-set, push, pop and meet; return what this process saw."""
    store = tcp(port, is_ours)
    totals = [store.add("sum", 1) for _ in range(count)]
    won = 0
    while won < count:
        old = store.get("cas")
        new = b"%d %d" % (int(old.split()[0]) + 1, rank)
        if store.compare_set("cas", old, new) == new:
            won += 1
    for i in range(count):
        store.queue_push("queue", f"{rank}/{i}")
    popped = [pop_patiently(store, is_ours) for _ in range(count)]
    store.barrier("end", world_size, SOON)
    return totals, popped


def pop_patiently(store, is_ours):
    while True:
        try:
            return store.queue_pop("queue")
        except dist.QueueEmptyError:
            assert not is_ours, "our blocking pop must not find an empty queue"


def tcp_wait(port, key):
    """Wait for a key that never comes; return the error, and when it was raised."""
    store = tcp(port, True)
    store.add("waiting", 1)
    try:
        store.wait([key], timedelta(seconds=60))
    except Exception as error:
        return type(error).__name__, str(error), time.time()
    return "nothing", "", time.time()


def gloo(make, arguments, rank, world_size):
    """Run collectives on torch's gloo over a store that nothing else refers to."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=make(rank, world_size, *arguments), rank=rank, world_size=world_size, timeout=SOON
    )
    tensor = torch.full((4,), float(rank))
    dist.all_reduce(tensor)
    group = dist.new_group(list(range(world_size)))
    gathered = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
    half = dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(half)
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    dist.destroy_process_group()
    return tensor.tolist(), [int(each) for each in gathered], objects


def make_tcp(rank, world_size, port):
    return stores.TCPStore("127.0.0.1", port, None, False, SOON)


def make_prefixed_tcp(rank, world_size, port):
    return stores.PrefixStore("job", stores.TCPStore("127.0.0.1", port, None, False, SOON))


def make_torch_prefixed_tcp(rank, world_size, port):
    return dist.PrefixStore("job", stores.TCPStore("127.0.0.1", port, None, False, SOON))


def make_file(rank, world_size, path):
    return stores.FileStore(path, world_size)


def own_server(pipe, secret=None):
    """Own a server until killed."""
    store = stores.TCPStore("127.0.0.1", 0, None, True, secret=secret)
    store.set("k", "v")
    pipe.send((store.port, store._server.process.pid))
    time.sleep(60)


def own_server_and_spin(pipe):
    """Own a server while this process's interpreter lock is busy."""
    store = stores.TCPStore("127.0.0.1", 0, None, True)
    store.set("k", "v")
    pipe.send(store.port)
    while True:
        pass


def own_server_of_torch(pipe, use_libuv):
    store = dist.TCPStore("127.0.0.1", 0, None, True, use_libuv=use_libuv)
    pipe.send(store.port)
    time.sleep(60)


def gloo_alone(number):
    """Run gloo with four ranks as threads of this process over one HashStore."""
    store = stores.HashStore()

    def rank_main(rank):
        group = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, 4, SOON)
        tensor = torch.full((1,), number / 4)
        group.allreduce([tensor]).wait()
        return tensor.tolist()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(rank_main, range(4)))
    assert results == [results[0]] * 4
    return results[0]
