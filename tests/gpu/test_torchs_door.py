"""What torch.distributed calls on a group of ours with CUDA tensors: messages together, bound groups, and an abort."""

import threading
import time

import pytest
import torch
import torch.distributed as c10d
from torch.distributed.distributed_c10d import _abort_process_group, _coalescing_manager

import hpcdist as dist

COUNT = 1000
SLEEP_CYCLES = 100_000_000


def exchange(rank, size, device, doors, count=2):
    """Send ``count`` messages to every rank and receive as many, in an order of this rank's own."""
    operations, received = [], []
    for peer in range(size):
        for index in range(count):
            sent = torch.full((2 * COUNT,), 100.0 * rank + 10 * peer + index, device=device)[::2]
            target = torch.empty(2 * COUNT, device=device)[::2]
            both = [doors.P2POp(doors.isend, sent, peer), doors.P2POp(doors.irecv, target, peer)]
            operations += both[:: (-1) ** rank]
            received.append((target, 100.0 * peer + 10 * rank + index))
    return operations, received


def test_messages_to_all_ranks_by_both_doors(rank, size, device):
    torch.cuda._sleep(SLEEP_CYCLES)
    for doors in (c10d, dist, (c10d, dist)[rank % 2]):
        operations, received = exchange(rank, size, device, doors)
        works = doors.batch_isend_irecv(operations)
        del operations
        for work in works:
            work.wait()
        for target, value in received:
            assert bool((target == value).all())


def test_one_way_messages(two_ranks, rank, device):
    targets = [torch.zeros(COUNT, device=device) for _ in range(3)]
    if rank == 0:
        operations = [c10d.P2POp(c10d.isend, torch.full((COUNT,), 5.0 + index, device=device), 1) for index in range(3)]
    else:
        operations = [c10d.P2POp(c10d.irecv, target, 0) for target in targets]
    if rank < 2:
        for work in c10d.batch_isend_irecv(operations):
            work.wait()
    if rank == 1:
        assert [target[0].item() for target in targets] == [5.0, 6.0, 7.0]


def test_a_coalescing_manager_launches_all_kinds_of_calls_at_its_end(rank, size, device):
    root = size - 1
    sent = torch.full((COUNT,), float(rank), device=device)
    strided = torch.full((2 * COUNT,), float(rank), device=device)[::2]
    gathered = [torch.empty(2 * COUNT, device=device)[::2] for _ in range(size)]
    ours, other = torch.ones(COUNT, device=device), torch.full((COUNT,), float(rank), device=device)
    on_cpu = torch.ones(3)
    torch.cuda._sleep(SLEEP_CYCLES)
    with _coalescing_manager(device=device, async_ops=True) as manager:
        c10d.broadcast(strided, root)
        c10d.all_gather(gathered, sent)
        asked = c10d.broadcast(other, root, async_op=True)
        dist.all_reduce(ours)
        dist.all_reduce(on_cpu)
    manager.wait()
    assert asked.wait()
    assert bool((strided == root).all())
    assert bool((other == root).all())
    assert [each[0].item() for each in gathered] == list(range(size))
    assert bool((ours == size).all())
    assert on_cpu.tolist() == [size] * 3


def test_a_message_that_is_refused_leaves_nothing_held_back(rank, size, device):
    right, left = (rank + 1) % size, (rank - 1) % size
    good, target = torch.ones(3, device=device), torch.zeros(3, device=device)
    sparse = torch.ones(3).to_sparse()
    asked = []

    def broadcast_together():
        with _coalescing_manager(device=device, async_ops=True):
            asked.append(c10d.broadcast(good, 0, async_op=True))
            c10d.broadcast(sparse, 0)

    with pytest.raises(TypeError, match="dense tensors"):
        broadcast_together()
    with pytest.raises(dist.DistBackendError, match="the call was not made"):
        asked[0].wait()
    with pytest.raises(TypeError, match="messages carry dense tensors"):
        c10d.batch_isend_irecv([c10d.P2POp(c10d.isend, good, right), c10d.P2POp(c10d.isend, sparse, right)])
    c10d.all_reduce(good)
    assert good.tolist() == [size] * 3
    for work in c10d.batch_isend_irecv([c10d.P2POp(c10d.irecv, target, left), c10d.P2POp(c10d.isend, good, right)]):
        work.wait()
    assert target.tolist() == [size] * 3


def test_an_error_inside_a_coalescing_manager_drops_what_is_held_back(group, rank, size, device):
    dropped, tensor = torch.ones(3, device=device), torch.ones(3, device=device)

    def fail():
        with _coalescing_manager(group, device=device):
            c10d.broadcast(dropped, 0, group=group)
            c10d.broadcast([dropped], 0, group=group)  # which torch refuses before it asks the group

    with pytest.raises(TypeError, match="Expected parameter `tensor`"):
        fail()
    c10d.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size] * 3
    with _coalescing_manager(group, device=device):
        c10d.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size**2] * 3


def test_groups_of_a_world_that_is_bound_to_a_gpu(world, rank, size, device):
    world.bound_device_id = device
    try:
        everyone, first = c10d.new_group(), c10d.new_group([0])
        mine = c10d.split_group(None, [[each] for each in range(size)])
        assert everyone.bound_device_id == device
        for group, members in ((everyone, size), (first, 1), (mine, 1)):
            if group is c10d.GroupMember.NON_GROUP_MEMBER:
                continue
            assert group.backend("cuda").communicators.is_eager or group is mine
            tensor = torch.ones(3, device=device)
            c10d.all_reduce(tensor, group=group)
            assert tensor.tolist() == [members] * 3
            if group is everyone and rank < 2 <= size:
                (c10d.send if rank == 0 else c10d.recv)(tensor, 1 - rank, group=group)
            assert not group.backend("cuda").communicators.pairs
            c10d.destroy_process_group(group)
    finally:
        world.bound_device_id = None


@pytest.mark.parametrize("way", ["method", "torch", "backend"])
def test_an_abort_ends_a_call_that_others_do_not_make(two_ranks, way, rank, device):
    group = c10d.new_group()
    dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.cuda.synchronize()
    dist.barrier()
    work = dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True) if rank == 0 else None

    def abort():
        time.sleep(0.2)
        if way == "torch":
            _abort_process_group(group)
        else:
            (group if way == "method" else group._get_backend(device)).abort()

    if rank == 0:
        thread = threading.Thread(target=abort)
        thread.start()
        torch.cuda.synchronize()  # until the abort ends the kernel
        thread.join()
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            work.wait()
        with pytest.raises((dist.DistBackendError, ValueError), match="aborted"):
            dist.all_reduce(torch.ones(1, device=device), group=group)
        dist.barrier()  # the others have not aborted it yet
    else:
        dist.barrier()
        abort()
    (dist if way == "torch" else c10d).destroy_process_group(group)
    with pytest.raises(ValueError, match="not a live group"):
        dist.destroy_process_group(group)
