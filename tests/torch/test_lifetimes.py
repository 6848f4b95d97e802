"""What Python hands to torch's C++ lives until C++ lets go of it, and no longer."""

import _thread
import contextlib
import gc
import queue
import time
import weakref

import pytest
import torch
import torch.distributed as torch_dist
from torch._C import _distributed_c10d as bindings
from torch.nn.parallel import DistributedDataParallel as DDP

import hpcdist as dist
from hpcdist.core.waiting import wait_until
from hpcdist.core.world import WORLD
from hpcdist.torch_bridge import mirror
from hpcdist_stores import keep_alive
from tests.programs import resident

CALLS = 100_000  # of two ranks; a fifth of more ranks than cores, and of calls through C++
GROWTH = 4 << 20  # bytes that so many calls may leave behind; measured: less than 0.3 MiB. A kept Work has 600 bytes


@pytest.fixture(autouse=True)
def _nothing_is_kept():
    gc.collect()
    before = len(keep_alive._kept)
    yield
    gc.collect()
    assert len(keep_alive._kept) <= before


WORKS = {
    "queued": lambda tensor: dist.all_reduce(tensor, async_op=True),
    "ended": lambda tensor: torch_dist.group.WORLD.allreduce([tensor], sync()),
    "several": lambda tensor: torch_dist.group.WORLD.allreduce_coalesced([tensor, torch.ones(1 << 18)]),
}


def sync():
    options = torch_dist.AllreduceOptions()
    options.asyncOp = False
    return options


@pytest.mark.parametrize("name", WORKS)
def test_a_work_that_only_cpp_holds(rank, size, name):
    tensor = torch.full((3,), rank + 1.0)
    work = WORKS[name](tensor)
    gone = weakref.ref(work)
    bindings._register_work(tensor, work)
    del work
    gc.collect()
    assert gone() is not None
    torch.ops._c10d_functional.wait_tensor(tensor)
    torch.testing.assert_close(tensor, torch.full((3,), size * (size + 1) / 2))
    dist.barrier()  # the queue keeps its last call until a synchronous one has waited for it
    gc.collect()
    assert wait_until(lambda: gone() is None, 10)  # a thread may just be looking at it


def test_torchs_methods_of_a_work_without_a_cpp_half(rank, size):
    """C++ would take memory that nobody has written for its half."""
    for name in vars(torch_dist.Work):
        if name.startswith("__") or name == "unbox":
            continue
        work = dist.all_reduce(torch.ones(2), async_op=True)
        given = (b"", torch_dist.Work, b"") if name == "_pybind11_conduit_v1_" else ()
        with contextlib.suppress(RuntimeError, TypeError):  # of torch's, what CPU tensors do not have
            getattr(work, name)(*given)
        assert work.wait()
        assert torch_dist.Work.unbox(work.boxed()) is work


def test_a_message_that_only_cpp_holds(rank, size):
    tensor = torch.zeros(3)
    sent = dist.isend(torch.full((3,), float(rank)), (rank + 1) % size)
    bindings._register_work(tensor, work=dist.irecv(tensor, (rank - 1) % size))
    gc.collect()
    torch.ops._c10d_functional.wait_tensor(tensor)
    torch.testing.assert_close(tensor, torch.full((3,), float((rank - 1) % size)))
    sent.wait()


@pytest.mark.skipif(not hasattr(bindings, "_current_process_group"), reason="torch has this name since 2.9")
def test_a_group_that_only_cpp_holds(rank, size):
    group = dist.group.WORLD.split_group(list(range(size)))
    gone = weakref.ref(group)
    before = bindings._current_process_group()
    bindings._set_process_group(group)
    del group
    gc.collect()
    try:
        kept = bindings._current_process_group()
        assert isinstance(kept, dist.ProcessGroup)
        tensor = torch.ones(2)
        torch_dist.ProcessGroup.allreduce(kept, [tensor], sync()).wait()  # by way of C++
        assert tensor.tolist() == [size, size]
        kept.shutdown()
        del kept
    finally:
        bindings._set_process_group(before)
    gc.collect()
    assert wait_until(lambda: gone() is None, 10)  # a thread may just be looking at it


def test_a_group_that_a_reducer_holds(rank, size):
    parallel = DDP(torch.nn.Linear(2, 2), process_group=dist.group.WORLD.split_group(list(range(size))))
    del parallel.process_group
    gc.collect()
    parallel(torch.ones(1, 2)).sum().backward()
    torch.testing.assert_close(parallel.module.weight.grad, torch.ones(2, 2))


def run_async(tensor):
    dist.all_reduce(tensor, async_op=True).wait()


def run_registered(tensor):
    bindings._register_work(tensor, dist.all_reduce(tensor, async_op=True))
    torch.ops._c10d_functional.wait_tensor(tensor)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("call", [run_async, run_registered])
def test_memory_stays_flat(rank, size, call):
    tensor = torch.zeros(4)
    calls = CALLS if size <= 2 and call is run_async else CALLS // 5
    for _ in range(calls // 10):  # pools, caches and the ring of the last calls fill
        call(tensor)
    gc.collect()
    before = resident()
    for _ in range(calls):
        call(tensor)
    gc.collect()
    assert resident() - before < GROWTH


def test_a_thread_of_cpps_own_does_not_open_the_worlds_store(world, rank, monkeypatch):
    """torch's NCCL looks for a signal in it from such a thread, each rank when it likes; to open it takes all ranks."""
    monkeypatch.setattr(WORLD, "store", None)
    found = queue.SimpleQueue()
    if rank == 0:
        store = torch_dist.PrefixStore("prefix", mirror.LATE_STORE)
        _thread.start_new_thread(lambda: found.put(store.check(["signal"])), ())
        assert found.get(timeout=20) is False
    assert WORLD.store is None


def test_a_group_goes_though_the_watchdog_has_seen_a_call_of_it(rank, size):
    group = dist.new_group()
    gone = weakref.ref(group)
    if rank == 0:
        time.sleep(1.2)  # the watchdog looks once a second
    dist.all_reduce(torch.ones(2), group=group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert wait_until(lambda: gone() is None, 10)  # a thread may just be looking at it
