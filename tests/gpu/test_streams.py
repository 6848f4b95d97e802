"""Order of calls with the kernels around them, and a host that stays free."""

import ctypes
import gc
import threading
import time
from datetime import timedelta

import pytest
import torch

import hpcdist as dist
from hpcdist.backends.nccl.streams import capture_mode

SLEEP_CYCLES = 400_000_000  # a few tenths of a second


def test_wait_does_not_block_the_host(gate, rank, size, device):
    ended = torch.cuda.Event()
    gate.close()
    tensor = torch.ones(4, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    ended.record()
    assert not ended.query()
    assert not work.is_completed()
    gate.open()
    torch.cuda.synchronize()
    assert work.is_completed()
    assert tensor.tolist() == [size] * 4


def test_wait_with_a_limit_blocks_the_host(gate, rank, size, device):
    gate.close()
    work = dist.all_reduce(torch.ones(4, device=device), async_op=True)
    with pytest.raises(dist.DistBackendError, match="timeout after 1ms"):
        work.wait(timedelta(milliseconds=1))
    gate.open()
    assert work.wait(timedelta(seconds=30))
    assert work.is_completed()


def test_a_wait_blocks_the_host_where_torchs_variable_says_so(connect, gate, device, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    group = connect()
    gate.close()
    work = dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True)
    assert not work.is_completed()
    threading.Timer(0.2, gate.open).start()
    work.wait()
    assert work.is_completed()


def test_a_barrier_with_device_ids_is_nccls_and_waits_on_the_host(gate, rank, size, device):
    reached = torch.cuda.Event()
    gate.close()
    reached.record()
    dist.barrier()  # MPI's
    assert not reached.query()
    threading.Timer(0.2, gate.open).start()
    dist.barrier(device_ids=[device.index])
    assert reached.query()


def test_dropped_works_and_temporaries(rank, size, device):
    results = []
    for index in range(200):
        tensor = torch.full((50_000,), float(rank + index), device=device)
        results.append((index, tensor, dist.all_reduce(tensor, async_op=True)))
        dist.all_reduce(torch.ones(50_000, device=device), async_op=True)
        if index % 50 == 0:
            gc.collect()
    for index, tensor, work in results:
        work.wait()
        assert bool((tensor == sum(each + index for each in range(size))).all())


def test_calls_launched_together_come_behind_the_streams_that_they_began_on(world, rank, size, device):
    sides = [torch.cuda.Stream() for _ in range(2)]
    tensors = [torch.zeros(1 << 10, device=device) for _ in sides]
    torch.cuda.synchronize()
    world._start_coalescing(device)
    for side, tensor in zip(sides, tensors, strict=True):
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            tensor += 1
            world.allreduce([tensor])
    world._end_coalescing(device).wait()
    assert all(bool((tensor == size).all()) for tensor in tensors)


def test_the_future_of_a_work(rank, size, device):
    tensor = torch.ones(1 << 20, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    assert bool((doubled.wait() == 2 * size).all())
    assert work.is_completed()  # and does not fulfil it a second time


def test_several_works_as_one_on_two_streams(world, gate, rank, size, device):
    side = torch.cuda.Stream()
    tensors = [torch.ones(1 << 20, device=device) for _ in range(2)]
    torch.cuda.synchronize()
    gate.close()
    work = world.allreduce_coalesced(tensors)
    work.wait()
    assert not work.is_completed()
    gate.open()
    with torch.cuda.stream(side):
        work.wait()
        doubled = [tensor * 2 for tensor in tensors]
    side.synchronize()
    for each in doubled:
        assert bool((each == 2 * size).all())
    assert work.is_success()


@pytest.mark.parametrize("order", [1, -1])
def test_a_blocking_call_on_tensors_of_the_cpu_and_the_gpu(order, gate, size, device):
    on_gpu, on_cpu = torch.ones(1 << 20, device=device), torch.ones(3)
    torch.cuda.synchronize()
    gate.close()
    dist.all_reduce_coalesced([on_gpu, on_cpu][::order])
    assert on_cpu.tolist() == [size] * 3
    doubled = on_gpu * 2  # on the caller's stream, which is to wait for NCCL's
    gate.open()
    assert bool((doubled == 2 * size).all())


def test_the_future_of_several_works(world, gate, rank, size, device):
    tensors = [torch.ones(1 << 20, device=device) * 1 for _ in range(2)]
    dist.all_reduce(tensors[0], dist.ReduceOp.MAX)
    gate.close()
    work = world.allreduce_coalesced(tensors)
    doubled = work.get_future().then(lambda done: [each * 2 for each in done.value()])
    assert not work.is_completed()
    gate.open()
    for each in doubled.wait():
        assert bool((each == 2 * size).all())


@pytest.mark.parametrize("kind", ["one", "several", "barrier"])
def test_blocking_the_current_stream(kind, world, gate, rank, size, device):
    tensor = torch.ones(1 << 20, device=device)
    begin = {
        "one": lambda: dist.all_reduce(tensor, async_op=True),
        "several": lambda: world.allreduce_coalesced([tensor]),
        "barrier": lambda: dist.barrier(device_ids=[device.index], async_op=True),
    }[kind]
    gate.close()
    work = begin()
    work.block_current_stream()
    assert not work.is_completed()
    gate.open()
    assert bool((tensor * 2 == 2 * (1 if kind == "barrier" else size)).all())


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("backend", ["nccl", "cuda:torch"])
def test_inside_a_graphs_capture(backend, is_async, connect, size, device):
    group = connect(backend=backend)
    tensor = torch.ones(1024, device=device)
    graph = torch.cuda.CUDAGraph()
    kept = dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True)
    with torch.cuda.graph(graph):
        work = dist.all_reduce(tensor, group=group, async_op=is_async)
        if is_async:
            work.wait()
        time.sleep(1.5)  # the watchdog looks meanwhile, at least once a second
        tensor += 1
    kept.wait()
    tensor.fill_(1)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    expected = 1.0
    for _ in range(3):
        expected = expected * size + 1
    assert bool((tensor == expected).all())
    graph.reset()


def test_a_query_leaves_the_threads_capture_mode_as_it_was(world):
    world.backend("cuda").outstanding()
    exchange, mode = capture_mode(), ctypes.c_int(0)
    exchange(ctypes.byref(mode))
    assert mode.value == 0  # CU_STREAM_CAPTURE_MODE_GLOBAL


def test_a_split_waits_for_the_replays_of_a_graph(connect, gate, size, device):
    """Whatever stream they are on: NCCL wants none of the parent's calls under way."""
    group, tensor, stream = connect(), torch.ones(4, device=device), torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor, group=group)
    with torch.cuda.stream(stream):
        gate.close()
        graph.replay()
    opener = threading.Timer(0.2, gate.open)
    opener.start()
    child = dist.split_group(group, [list(range(size))])
    assert stream.query()
    opener.join()
    torch.cuda.synchronize()
    graph.reset()
    dist.destroy_process_group(child)


def test_a_call_that_one_rank_captures_and_the_others_make_ends_at_the_timeout(two_ranks, connect, rank, device):
    """NCCL wants it captured on all ranks or on none: on the capturing rank nothing has been called yet."""
    group, tensor = connect(timeout=timedelta(seconds=2)), torch.ones(4, device=device)
    if rank == 0:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            dist.all_reduce(tensor, group=group)
        dist.barrier()  # until the watchdogs of the others have ended their calls
        graph.reset()
        group.backend("cuda").faults.interrupt("a test says so")
    else:
        dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        with pytest.raises(dist.DistBackendError, match="rank 0 has done all_reduce #2 or a call in its place"):
            dist.all_reduce(tensor, group=group)
        dist.barrier()
