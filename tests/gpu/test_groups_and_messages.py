"""Messages, grouped calls, subgroups and the end of groups on NCCL."""

import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch

import hpcdist as dist
from hpcdist.backends.nccl.library import load
from hpcdist.core.call import Call
from hpcdist.core.table import ALL_REDUCE
from hpcdist.core.waiting import wait_until


def test_messages_around_a_ring(group, rank, size, device):
    right, left = (rank + 1) % size, (rank - 1) % size
    received, to_self = torch.empty(5, 2, device=device)[:, 0], torch.empty(2, device=device)
    operations = [
        dist.P2POp(dist.isend, torch.full((5,), float(rank), device=device), right, group),
        dist.P2POp(dist.irecv, received, left, group),
        dist.P2POp(dist.isend, torch.full((2,), 7.0 + rank, device=device), rank, group),
        dist.P2POp(dist.irecv, to_self, rank, group),
    ]
    for _ in range(3):
        received.zero_()
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert received.tolist() == [left] * 5
        assert to_self.tolist() == [7.0 + rank] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64, torch.bool])
def test_send_and_recv(two_ranks, group, dtype, rank, device):
    tensor = torch.ones(3, device=device).to(dtype)
    if rank == 0:
        dist.send(tensor, 1, group)
        dist.isend(tensor, 1, group).wait()
    elif rank == 1:
        for receive in (dist.recv, dist.irecv):
            target = torch.zeros(3, 2, device=device).to(dtype)[:, 0]
            source = receive(target, 0, group)
            if receive is dist.irecv:
                source.wait()
                source = source.source_rank()
            assert source == 0
            assert torch.equal(target, tensor)


def test_messages_that_nccl_cannot_carry(world, rank, device):
    tensor = torch.ones(1, device=device)
    with pytest.raises(dist.DistBackendError, match="batch_isend_irecv"):
        world.backend("cuda").isend(tensor, rank, 0)
    with pytest.raises(dist.DistBackendError, match="name the sender"):
        world.backend("cuda").recv(tensor, None, 0)


def test_coalesced_calls(group, rank, size, device):
    tensors = [torch.full((n,), float(rank), device=device) for n in (1, 10, 100_000)]
    flat, strided = torch.empty(size, device=device), torch.full((3, 2), float(rank), device=device)[:, 0]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
        dist.all_gather_into_tensor(flat, torch.tensor([float(rank)], device=device), group)
    manager.wait()
    with group.grouped():  # the second is no call that torch's library launches together with others
        works = [dist.all_reduce(tensors[0], group=group, async_op=True)]
        works.append(dist.broadcast(strided, size - 1, group, async_op=True))
    for work in works:
        work.wait()
    assert tensors[0].item() == sum(range(size)) * size
    assert all(bool((tensor == sum(range(size))).all()) for tensor in tensors[1:])
    assert flat.tolist() == list(range(size))
    assert strided.tolist() == [size - 1] * 3


@pytest.mark.parametrize("is_connected", [False, True])
def test_subgroups(is_connected, rank, size, device):
    parent = dist.new_group()
    if is_connected:
        dist.all_reduce(torch.ones(1, device=device), group=parent)
    mine = dist.split_group(parent, [list(range(0, size, 2)), list(range(1, size, 2))] if size > 1 else [[0]])
    members = list(range(rank % 2, size, 2))
    assert mine.backend("cuda").communicators.is_eager
    tensor = torch.full((3,), float(rank), device=device)
    dist.all_reduce(tensor, group=mine)
    assert tensor.tolist() == [sum(members)] * 3
    last = parent.backend("cuda").split([[size - 1]], ["last"], timedelta(seconds=30))
    assert (last is not None) == (rank == size - 1)
    if last is not None:
        last.close()
    dist.destroy_process_group(mine)
    dist.destroy_process_group(parent)


@pytest.mark.parametrize("aborts", [False, True])
def test_shrink(two_ranks, aborts, connect, rank, size, device):
    group, tensor = connect(), torch.ones(2, device=device)
    backend = group.backend("cuda")
    if rank != size - 1:
        work = dist.all_reduce(torch.ones(2, device=device), group=group, async_op=True) if aborts else None
        smaller = backend.shrink([size - 1], "smaller", aborts)  # nobody waits for a rank that is gone
        if work is not None:
            with pytest.raises(dist.DistBackendError, match="shrinks the NCCL communicator without ranks"):
                work.wait()
        smaller.run(Call(ALL_REDUCE, tensor, tensor, dist.ReduceOp.SUM))
        assert tensor.tolist() == [size - 1] * 2
        smaller.close()
    dist.barrier()
    if aborts:
        backend.faults.interrupt("a rank is gone")


def test_a_split_waits_for_the_groups_own_calls_only(emulation, connect, gate, size, device):
    parent = connect()  # no graph has held its calls, after which a split waits for the whole device
    with torch.cuda.stream(torch.cuda.Stream()):
        gate.close()  # a kernel of the program's that takes long
    group = dist.split_group(parent, [list(range(size))])
    gate.open()
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == size
    dist.destroy_process_group(group)


def test_an_abort_ends_the_groups_communicator_and_those_of_messages(two_ranks, connect, rank, device):
    group, tensor = connect(), torch.ones(1, device=device)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank, group=group)
    torch.cuda.synchronize()
    backend = group.backend("cuda")
    assert backend.faults.check_async() is None
    work = dist.all_reduce(tensor, group=group, async_op=True) if rank == 0 else None  # which the others do not make
    seen = backend.outstanding()
    assert seen is None if work is None else seen.pending is work.pending
    began = time.monotonic()
    assert backend.faults.interrupt("a test says so")
    assert time.monotonic() - began < 5
    if work is not None:
        with pytest.raises(dist.DistBackendError, match="a test says so"):
            work.wait()
    torch.cuda.synchronize()
    with pytest.raises(dist.DistBackendError, match="a test says so"):
        dist.all_reduce(tensor, group=group)
    dist.barrier()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_a_rank_never_makes_ends_at_the_timeout(two_ranks, is_async, connect, rank, device):
    group = connect(timeout=timedelta(seconds=3))
    if rank == 1:
        dist.barrier()  # until the watchdogs of the others have ended their calls
        group.backend("cuda").faults.interrupt("it never came")
    else:
        began = time.monotonic()
        work = dist.all_reduce(torch.ones(1, device=device), group=group, async_op=is_async)
        torch.cuda.synchronize()  # until the watchdog ends the kernel
        assert 2 < time.monotonic() - began < 60
        if work is not None:
            with pytest.raises(dist.DistBackendError, match="rank 1 has not entered all_reduce"):
                work.wait()
        with pytest.raises(dist.DistBackendError, match="rank 1 has not entered all_reduce"):
            dist.all_reduce(torch.ones(1, device=device), group=group)
        dist.barrier()


def test_a_rank_that_comes_late_is_waited_for(two_ranks, connect, rank, size, device):
    group, tensor = connect(timeout=timedelta(seconds=4)), torch.ones(1, device=device)
    if rank == 1:
        time.sleep(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == size


@pytest.mark.parametrize("backend", ["nccl", "mpi", "cuda:torch"])
def test_a_group_of_one_library_alone(connect, backend, size, device):
    group, tensor = connect(backend=backend), torch.ones(1000, device=device)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    assert bool((tensor == size * size).all())


@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_messages_into_tensors_made_in_inference_mode(backend, connect, rank, size, device):
    group = connect(backend=backend)
    right, left = (rank + 1) % size, (rank - 1) % size
    with torch.inference_mode():
        targets = [torch.zeros(4, device=device), torch.zeros((4, 2), device=device)[:, 0]]
        sent = torch.full((4,), rank + 1.0, device=device)
        operations = [dist.P2POp(dist.irecv, target, left, group) for target in targets]
        works = dist.batch_isend_irecv([*operations, *[dist.P2POp(dist.isend, sent, right, group)] * 2])
    for work in works:
        work.wait()
    assert [target.tolist() for target in targets] == [[left + 1.0] * 4] * 2


def test_options_reach_nccl(world, rank, size, device, monkeypatch):
    """A group's own, then those of its parent; the side stream has the priority that they say."""
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.net_name = 2, "Socket"
    made = []
    config = load().core.NCCLConfig
    init = config.__init__
    monkeypatch.setattr(config, "__init__", lambda self, **given: made.append(given) or init(self, **given))
    tensor = torch.ones(1, device=device)
    group = dist.new_group(pg_options=options)
    child = dist.split_group(group, [list(range(size))])
    for each in (group, child):
        tensor.fill_(1)
        dist.all_reduce(tensor, group=each, async_op=True).wait()
        assert tensor.item() == size
        assert each.backends["cuda"].communicators.group.streams.side.priority == -1
        dist.destroy_process_group(each)
    assert made == [{"min_ctas": 2, "net_name": "Socket"}] * 2
    plain = dist.new_group()
    dist.all_reduce(tensor, group=plain)
    assert len(made) == 2
    dist.destroy_process_group(plain)


def get_nothing(call):
    call(async_op=False)
    torch.cuda.synchronize()  # until the watchdog ends the kernel


def get_it_from_the_next_call(call):
    get_nothing(call)
    with pytest.raises(dist.DistBackendError):
        call(async_op=False)


def get_it_without_its_traceback(call):
    get_nothing(call)
    with pytest.raises(dist.DistBackendError) as caught:
        call(async_op=False)
    caught.value.with_traceback(None)  # as unittest's assertRaises does


def get_it_from_wait(call):
    work = call(async_op=True)
    torch.cuda.synchronize()
    with pytest.raises(dist.DistBackendError):
        work.wait()


def get_it_from_exception(call):
    work = call(async_op=True)
    wait_until(work.is_completed, 30)
    assert isinstance(work.exception(), dist.DistBackendError)


def get_it_from_a_future(call):
    work = call(async_op=True)
    wait_until(work.is_completed, 30)
    with pytest.raises(RuntimeError):
        work.get_future().wait()


GETS = [
    *(get_nothing, get_it_from_the_next_call, get_it_without_its_traceback, get_it_from_wait, get_it_from_exception),
    get_it_from_a_future,
]


@pytest.mark.parametrize("get", GETS)
def test_the_end_raises_the_error_of_a_call_that_nobody_got(two_ranks, get, rank, device):
    """A synchronous call has no Work, and there may be no later call."""
    group, tensor = dist.new_group(timeout=timedelta(seconds=1)), torch.ones(1, device=device)
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    faults = group.backend("cuda").faults
    if rank == 0:
        get(partial(dist.all_reduce, tensor, group=group))
        if get is not get_nothing:
            faults.interrupt("once more", 0)  # a second reason is not another error
    dist.barrier()
    if rank != 0:
        faults.interrupt("it never came")
    error = pytest.raises(dist.DistBackendError, match="rank 1 has not entered all_reduce")
    with error if rank == 0 and get is get_nothing else nullcontext():
        dist.destroy_process_group(group)
