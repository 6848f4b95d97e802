"""Groups as objects, without a registry."""

import threading
from datetime import timedelta

import pytest
import torch

import hpcdist as dist
from hpcdist import dist2
from tests.ranks import sum_of_ranks

LIMIT = timedelta(seconds=30)


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_a_group_of_its_own(backend, rank, size):
    known = dist.get_pg_count()
    group = dist2.new_group(backend, LIMIT, "cpu")
    assert (group.rank(), group.size()) == (rank, size)
    tensor = torch.full((2,), rank + 1.0)
    group.allreduce(tensor, dist2.ReduceOp.SUM, LIMIT).wait()
    torch.testing.assert_close(tensor, torch.full((2,), size * (size + 1) / 2))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    assert dist.get_pg_count() == known
    assert group is not dist.group.WORLD
    group.shutdown()


def test_a_group_of_a_communicator(rank, size):
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(rank % 2, rank)
    group = dist2.new_group("mpi", LIMIT, "cpu", comm=part)
    tensor = torch.ones(1)
    group.allreduce(tensor).wait()
    assert tensor.item() == part.Get_size()
    group.shutdown()
    part.Free()


def test_arguments_that_are_refused(size):
    from mpi4py import MPI

    for kind, text, backend, timeout, device, options in (
        (KeyError, "Unknown option colour", "mpi", LIMIT, "cpu", {"colour": "red"}),
        (KeyError, "Unknown option options of backend nccl", "nccl", LIMIT, "cuda", {"options": object()}),
        (ValueError, "not registered", "pigeon", LIMIT, "cpu", {}),
        (ValueError, "carries", "gloo", LIMIT, "cuda:0", {}),
        (TypeError, "comm is 'x' of type str", "mpi", LIMIT, "cpu", {"comm": "x"}),
        (ValueError, "MPI.COMM_NULL", "mpi", LIMIT, "cpu", {"comm": MPI.COMM_NULL}),
        (TypeError, "timedelta, got 30", "mpi", 30, "cpu", {}),
        (TypeError, "timedelta, got None", "mpi", None, "cpu", {}),
        (RuntimeError, "Invalid timeout: -30 s", "mpi", -LIMIT, "cpu", {}),
        (ValueError, "got device meta", "mpi", LIMIT, "meta", {}),
    ):
        with pytest.raises(kind, match=text):
            dist2.new_group(backend, timeout, device, **options)
    assert sum_of_ranks() == size


def test_a_registered_factory(rank, size):
    from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo

    def factory(store, rank, world_size, timeout, device, **kwargs):
        gloo = ProcessGroupGloo(store, rank, world_size, timeout)
        group = ProcessGroup(store, rank, world_size)
        group._register_backend(device, ProcessGroup.BackendType.GLOO, gloo)
        return group

    dist2.register_backend("plain", factory)
    with pytest.raises(ValueError, match="already registered"):
        dist2.register_backend("plain", factory)
    group = dist2.new_group("plain", LIMIT, "cpu")
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    assert tensor.item() == size
    group.shutdown()


def test_the_current_group_is_a_threads_own():
    group = dist2.new_group("mpi", LIMIT, "cpu")
    seen = []
    assert dist2.current_process_group() is None
    with dist2.process_group(group):
        assert dist2.current_process_group() is group
        other = threading.Thread(target=lambda: seen.append(dist2.current_process_group()))
        other.start()
        other.join()
    assert seen == [None]
    assert dist2.current_process_group() is None
    group.shutdown()
