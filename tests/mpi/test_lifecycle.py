"""The world begins and ends cleanly, again and again, and over communicators that others own."""

import ctypes
import os
import time
from datetime import timedelta

import pytest
import torch

import hpcdist as dist
from hpcdist.backends.mpi import cuda as staging
from hpcdist.backends.mpi import retired
from hpcdist.core import hooks
from hpcdist.core.waiting import wait_until
from hpcdist.core.work import Unfinished
from hpcdist.launch import environment
from hpcdist.watch.watchdog import RUNNING
from tests.ranks import of_all_ranks, sum_of_ranks

pytestmark = pytest.mark.skipif("HPCDIST_TEST_BACKEND" in os.environ, reason="MPI's own life cycle")


@pytest.fixture(autouse=True)
def _default_group_after():
    yield
    if not dist.is_initialized():
        dist.init_process_group()


def test_again_and_again(rank, size):
    for _ in range(300):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group()
        group = dist.new_group()
        assert group.group_name == "1"
        assert sum_of_ranks() == size
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.get_rank()
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.destroy_process_group()


def test_a_communicator_of_ones_own(rank, size):
    from mpi4py import MPI

    dist.destroy_process_group()
    half = MPI.COMM_WORLD.Split(rank % 2, -rank)
    dist.init_process_group(comm=half, timeout=timedelta(minutes=1))
    assert dist.get_world_size() == half.Get_size()
    assert dist.get_rank() == half.Get_rank()
    assert sum_of_ranks() == half.Get_size()
    own = dist.get_mpi_comm()
    assert MPI.Comm.Compare(own, half) == MPI.CONGRUENT
    assert own.allreduce(1) == half.Get_size()
    # messages on the user's communicator and on the group's do not meet
    if half.Get_size() > 1:
        peer = 1 - half.Get_rank() if half.Get_rank() < 2 else None
        if peer is not None:
            request = half.isend("theirs", peer, 0)
            sent = dist.isend(torch.tensor([1.0]), peer)
            tensor = torch.zeros(1)
            dist.recv(tensor, peer)
            assert tensor.item() == 1
            assert half.recv(None, peer, 0) == "theirs"
            request.wait()
            sent.wait()
    dist.destroy_process_group()
    assert half.allreduce(1) == half.Get_size()  # it is still the user's
    half.Free()
    assert not MPI.Is_finalized()


def test_the_longest_timeout(rank, size):
    dist.destroy_process_group()
    dist.init_process_group(timeout=timedelta.max)
    assert dist.get_world_size(dist.new_group(timeout=timedelta.max)) == size
    dist.monitored_barrier(timeout=timedelta.max)
    tensor = torch.ones(100_000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(2)]
    for work in works:
        assert work.wait(timedelta.max)
    dist.barrier(timeout=timedelta.max)
    assert tensor[0].item() == size * size


def test_bad_arguments(rank, size):
    from mpi4py import MPI

    dist.destroy_process_group()
    for kind, arguments, text in (
        (TypeError, {"timeout": 5}, "timedelta"),
        (RuntimeError, {"timeout": timedelta(seconds=-5)}, "Invalid timeout: -5 s"),
        (TypeError, {"comm": 5}, "Intracomm"),
        (ValueError, {"comm": MPI.COMM_NULL}, "COMM_NULL"),
        (ValueError, {"backend": "smoke"}, "Unknown backend"),
        (ValueError, {"backend": 5}, "string"),
        (RuntimeError, {"init_method": 5}, "`url` must be a string"),
        (RuntimeError, {"rank": str(rank), "world_size": size}, "`rank` must be an integer. '"),
        (RuntimeError, {"rank": rank, "world_size": None}, "`world_size` must be an integer. None"),
        (TypeError, {"store": "tcp", "rank": rank, "world_size": size}, "expected a Store, got str 'tcp'"),
        (TypeError, {"device_id": "cuda:0"}, "device_id is 'cuda:0' of type str"),
        (ValueError, {"backend": "cpu:mpi,cpu:gloo"}, "Duplicate"),
        (ValueError, {"backend": "undefined"}, "undefined"),
        (AssertionError, {"init_method": "env://", "store": torch.distributed.HashStore()}, "both"),
        (AssertionError, {"store": torch.distributed.HashStore()}, "world_size"),
        (AssertionError, {"comm": 5, "init_method": "env://"}, "comm and init_method"),
        (AssertionError, {"comm": 5, "store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}, "comm and"),
        (ValueError, {"device_id": torch.device("cuda")}, "cuda"),
    ):
        with pytest.raises(kind, match=text):
            dist.init_process_group(**arguments)
        assert not dist.is_initialized()


def test_groups_of_a_group_that_was_aborted(rank, size):
    dist.group.WORLD.abort()
    for make in (
        dist.new_group,
        lambda: dist.new_group([0], use_local_synchronization=True),
        lambda: dist.new_subgroups(size),
        lambda: dist.split_group(None, [[0]]),
        lambda: dist.group.WORLD.split_group([0]),
    ):
        with pytest.raises(ValueError, match=r"not a live group .*\(group '0' was aborted\)"):
            make()
    dist.destroy_process_group()


EMPTY = ("INIT_METHOD", "REPRODUCIBLE", "LOG", "SHM", "CHECK_CALLS", "BRIDGE", "RANKS_FROM", "NODE_KEY", "DEBUG_SECRET")


def test_an_empty_variable_counts_as_unset(rank, size, monkeypatch):
    backend = dist.get_backend()
    dist.destroy_process_group()
    for name in EMPTY:
        monkeypatch.setenv(f"HPCDIST_{name}", "")
    dist.init_process_group()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, backend)


@pytest.mark.parametrize("front", ["hpcdist", "torch"])
@pytest.mark.parametrize("name", [*environment.SWITCHES, "TORCH_DISTRIBUTED_DEBUG", "HPCDIST_LOG", "HPCDIST_SHM"])
def test_a_bad_variable_leaves_no_group_behind(rank, size, front, name, monkeypatch):
    begin = {"hpcdist": dist.init_process_group, "torch": lambda: torch.distributed.init_process_group("hpcdist")}[
        front
    ]
    dist.destroy_process_group()
    raising = [set(range(size))] if name == "HPCDIST_SHM" else [set(range(size)), {0}]  # on all ranks, and on one
    for ranks in raising:
        if rank in ranks:
            monkeypatch.setenv(name, "bad")
            with pytest.raises(ValueError, match=name):
                begin()
            assert not dist.is_initialized()
            assert not torch.distributed.is_initialized()
            monkeypatch.delenv(name)
        begin()
        assert sum_of_ranks() == size
        dist.destroy_process_group()
        assert not torch.distributed.is_initialized()


def test_a_start_that_fails_late_leaves_no_group_behind(rank, size, monkeypatch):
    dist.destroy_process_group()
    monkeypatch.setenv("HPCDIST_REPRODUCIBLE", "1")

    def fail(*_):
        raise OSError("late")

    with monkeypatch.context() as patched:
        patched.setattr("hpcdist.torch_bridge.mirror.show", fail)
        with pytest.raises(OSError, match="late"):
            dist.init_process_group()
    assert not dist.is_initialized()
    monkeypatch.delenv("HPCDIST_REPRODUCIBLE")
    dist.init_process_group()
    assert dist.group.WORLD.group_name == "0"
    assert not hooks.reproducible


def test_a_duplicate_that_mpi_refuses(rank, size):
    from mpi4py import MPI

    def refuse(*_):
        raise MPI.Exception(MPI.ERR_OTHER)

    dist.destroy_process_group()
    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    comm.Set_attr(MPI.Comm.Create_keyval(copy_fn=refuse), "not to be copied")
    with pytest.raises(dist.DistBackendError, match="init_process_group failed in MPI"):
        dist.init_process_group(comm=comm)
    assert not dist.is_initialized()
    comm.Free()


def test_a_communicator_of_a_class_of_ones_own(rank, size):
    from mpi4py import MPI

    class Named(MPI.Intracomm):
        def __new__(cls, comm, name):
            made = super().__new__(cls, comm)
            made.name_of_it = name
            return made

    dist.destroy_process_group()
    dist.init_process_group(comm=Named(MPI.COMM_WORLD, "solver"))
    assert sum_of_ranks() == size
    assert type(dist.get_mpi_comm()) is MPI.Intracomm


def test_a_communicator_with_messages_under_way_is_not_freed(two_ranks, rank):
    """Its context would be given to a group whose receives took them."""
    from mpi4py import MPI

    group = dist.new_group()
    comm = MPI.Intracomm(dist.get_mpi_comm(group).Dup())
    if rank == 0:
        comm.send("nobody receives this", 1)
    comm.Barrier()
    if rank == 1:
        work = dist.irecv(torch.ones(1), 0, group)
        unfinished = Unfinished()
        unfinished.hold(work)
        assert not retired.free(unfinished, comm)  # it receives still
        assert work in unfinished
        assert retired.free(Unfinished(), comm)
        assert comm.recv(source=0) == "nobody receives this"
    elif rank == 0:
        dist.send(torch.ones(1), 1, group)
    if rank == 1:
        work.wait()
    assert retired.free(Unfinished(), comm)
    assert comm == MPI.COMM_NULL
    dist.destroy_process_group(group)


def test_ranks_of_a_part_of_a_world_name_it(rank, size):
    dist.destroy_process_group()
    dist.init_process_group(_ranks=[10 + r for r in range(size)])
    assert dist.get_process_group_ranks(None) == list(range(size))
    assert len(dist.group.WORLD.group_name) == 40
    dist.destroy_process_group()


def test_user_calls_on_the_groups_communicator(rank, size):
    comm = dist.get_mpi_comm()
    assert comm.Get_size() == size
    group = dist.new_group([rank], use_local_synchronization=True)
    assert dist.get_mpi_comm(group).Get_size() == 1
    dist.destroy_process_group(group)


def test_the_store_of_torchs_world_behind_its_prefix_store(rank, size):
    """C++ asks it for keys by other names, and sets its timeout without a call of Python."""
    from torch.distributed.distributed_c10d import PrefixStore

    from hpcdist.torch_bridge.mirror import LATE_STORE

    LATE_STORE.opened()  # on all ranks
    store = PrefixStore(f"prefix-{rank}/", LATE_STORE)
    store.set("a", "1")
    assert store.num_keys() >= 1
    assert store.delete_key("a")
    assert not store.check(["a"])
    assert not store.delete_key("a")
    limit = LATE_STORE.timeout
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(dist.DistStoreError, match=r"0\.3 s|300 ?ms"):
        store.get("b")
    store.set_timeout(limit)
    dist.barrier()


def test_ranks_that_leave_make_no_call_on_the_programs_communicator(two_ranks, rank):
    from mpi4py import MPI

    from hpcdist.backends.mpi.process import runtime

    dist.barrier()
    barrier = None if rank == 0 else MPI.COMM_WORLD.Ibarrier()
    leaves = runtime.exit_barrier() if rank == 0 else None
    dist.barrier()
    time.sleep(0.05)
    is_over = leaves() if leaves else barrier.Test()
    dist.barrier()
    assert not is_over  # the others have not left, and rank 0 has not come to their barrier, though it leaves
    if rank == 0:
        barrier = MPI.COMM_WORLD.Ibarrier()
    barrier.Wait()
    assert wait_until(leaves or runtime.exit_barrier(), 10)


def test_the_folder_of_traces_has_a_name_of_its_own(rank, size):
    """It stands in /tmp, and says nothing of the job's secret."""
    (watchdog,) = RUNNING
    names = of_all_ranks(watchdog.recorder.name)
    assert len({*names}) == 1
    assert len(names[0]) >= 16
    secrets = [*watchdog.channel.keys, *(each.key for each in watchdog.channel.endpoints.values())]
    parts = {names[0][at : at + 10] for at in range(len(names[0]) - 9)}
    assert not [part for part in parts for each in secrets if part in each]


def test_the_library_says_whether_it_takes_the_memory_of_gpus():
    libraries = [ctypes.CDLL(path) for path in staging.loaded_libraries()]
    answers = [each for library in libraries for each in staging.answers(library, staging.CUDA)]
    assert answers, "no extension to ask"
    assert all(isinstance(answer, bool) for answer in answers)
