"""Checks that each go wrong on purpose, after which the job continues: mpirun -n 3 python calm_job.py"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

import hpcdist as dist
from tests.faults.telling import tell


def a_wait_with_a_limit_raises_and_says_where_the_sender_is() -> None:
    if rank == 0:
        work = dist.irecv(torch.zeros(4), 1)
        with pytest.raises(dist.DistBackendError, match=r"wait timeout after 500ms.*rank 1 is .*calm_job\.py"):
            work.wait(timedelta(seconds=0.5))
    if rank == 1:
        time.sleep(1.5)
        dist.send(torch.ones(4), 0)
    if rank == 0:
        work.wait()
    dist.barrier()


def a_receive_past_the_timeout_of_its_group_raises() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        values = torch.zeros(4)
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="recv from rank 1"):
            dist.recv(values, 1, group)
        assert 1 <= time.monotonic() - start < 8
        with pytest.raises(dist.DistBackendError, match="irecv from rank 1"):
            dist.irecv(values, 1, group).wait()
        with pytest.raises(dist.DistBackendError, match="irecv from rank 1"):
            dist.exchange({1: torch.full((4,), 6.0)}, {1: values, 0: torch.zeros(1)}, group)
        with pytest.raises(dist.DistBackendError, match="recv_object_list from rank 1"):
            dist.recv_object_list([None], 1, group)
        dist.recv(values, 1)  # and what comes later is received
        assert values.tolist() == [7.0] * 4
        objects = [None]
        assert dist.recv_object_list(objects, 1, group) == 1
        assert objects == ["here"]
    if rank == 1:
        time.sleep(8)
        dist.send(torch.full((4,), 7.0), 0)
        dist.send_object_list(["here"], 0, group)
        values = torch.zeros(4)
        dist.exchange({}, {0: values}, group)  # what was sent before the other side gave up
        assert values.tolist() == [6.0] * 4
    dist.barrier()
    if rank < 2:
        dist.barrier(group)
        dist.destroy_process_group(group)


def a_monitored_barrier_names_who_is_missing() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    limit = timedelta(seconds=1)
    if rank == 1:
        time.sleep(4)
        dist.barrier()
        return
    said = (
        r"\[Rank 0\]: Rank 1 failed to pass monitoredBarrier in 1000 ms"
        if rank == 0
        else "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
    )
    with pytest.raises(RuntimeError, match=said):
        dist.monitored_barrier(timeout=limit, wait_all_ranks=True)
    dist.barrier()


def mismatches_raise_on_all_ranks_at_the_level_detail() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    values = torch.ones(4)
    dist.all_reduce(values)
    with pytest.raises(RuntimeError, match=r"Op type: ranks 0, 2: all_reduce; rank 1: barrier"):
        dist.barrier() if rank == 1 else dist.all_reduce(values)
    with pytest.raises(RuntimeError, match=r"Tensor sizes: ranks 0, 2: 4; rank 1: 5"):
        dist.all_reduce(torch.ones(5 if rank == 1 else 4))
    with pytest.raises(RuntimeError, match=r"Tensor dtypes: ranks 0, 2: torch.float32; rank 1: torch.float64"):
        dist.all_reduce(values.double() if rank == 1 else values)
    with pytest.raises(RuntimeError, match=r"Reduce op: ranks 0, 2: SUM; rank 1: MAX"):
        dist.all_reduce(values, dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
    with pytest.raises(RuntimeError, match=r"Root rank: ranks 0, 2: 0; rank 1: 1"):
        dist.broadcast(values, 1 if rank == 1 else 0)
    with pytest.raises(RuntimeError, match="Op type"):
        dist.all_gather_object([None] * 3, 1) if rank == 1 else dist.all_reduce(values, async_op=True)
    sent, received = [rank + peer for peer in range(3)], [rank + peer for peer in range(3)]
    wrong = [received[0] + (rank == 1), *received[1:]]
    with pytest.raises(RuntimeError, match=r"Counts: ranks 0, 1: rank 0 sends 1 elements to rank 1, which expects 2"):
        dist.all_to_all_single(torch.empty(sum(wrong)), torch.ones(sum(sent)), wrong, sent)
    one = dist._make_nccl_premul_sum(1.0)
    with pytest.raises(RuntimeError, match=r"Reduce op: ranks 0, 2: SUM; rank 1: PREMUL_SUM"):
        dist.all_reduce(values, one if rank == 1 else dist.ReduceOp.SUM)
    dist.all_gather_into_tensor(torch.empty(12), values)
    output = torch.empty(sum(received))
    dist.all_to_all_single(output, torch.full((sum(sent),), float(rank)), received, sent)
    assert output.tolist() == [float(peer) for peer in range(3) for _ in range(received[peer])]
    splits = [1] * 3 if rank == 1 else None
    dist.all_to_all_single(torch.empty(3), torch.ones(3), splits, splits)
    dist.all_reduce(values, one)
    dist.all_reduce(values, dist._make_nccl_premul_sum(torch.tensor(float(rank))))
    assert values.tolist() == [3.0 * 3 * (0 + 1 + 2)] * 4
    dist.set_debug_level(dist.DebugLevel.OFF)
    dist.all_reduce(values)


def a_live_rank_is_left_out() -> None:
    for wrong, error in (([], ValueError), ([5], ValueError), ([1, 1], ValueError), (1, TypeError)):
        with pytest.raises(error):
            dist.shrink_group(wrong)
    with pytest.raises(ValueError, match="SHRINK_ABORT"):
        dist.shrink_group([2], shrink_flags=7)
    with pytest.raises(RuntimeError, match="exclusion list"):
        dist.shrink_group([rank])
    dist.barrier()
    if rank == 1:
        return
    group = dist.shrink_group([1])
    assert dist.get_world_size() == 2
    assert dist.get_rank() == (0 if rank == 0 else 1)
    assert group is dist.group.WORLD
    assert [*torch.distributed.distributed_c10d._world.pg_map] == [group]  # the old one is not left in torch's registry
    values = torch.ones(3)
    dist.all_reduce(values)
    assert values.tolist() == [2.0] * 3
    gathered = [None, None]
    dist.all_gather_object(gathered, rank)
    assert gathered == [0, 2]


if __name__ == "__main__":
    dist.init_process_group()
    rank = dist.get_rank()
    a_wait_with_a_limit_raises_and_says_where_the_sender_is()
    a_receive_past_the_timeout_of_its_group_raises()
    a_monitored_barrier_names_who_is_missing()
    mismatches_raise_on_all_ranks_at_the_level_detail()
    a_live_rank_is_left_out()
    tell("calm")
