"""The MPI backend uses shared memory where it should, survives being interrupted, and gives everything back."""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed import ReduceOp

pytest.importorskip("mpi4py")
import hpcdist as dist
from hpcdist.backends.mpi import call_check, parts
from hpcdist.backends.mpi.node import call_board, threshold_file
from hpcdist.backends.mpi.node.thresholds import COLLECTIVES, HALF_ROWS, Thresholds
from hpcdist.backends.mpi.process import runtime
from hpcdist.cli import tune
from hpcdist.core.errors import CallsDifferError
from hpcdist.launch import topology
from tests.mpi.conftest import communicator
from tests.mpi.test_shared_memory import node_shared
from tests.programs import resident

SEED = 21


@pytest.fixture(scope="module")
def comm(_default_group):
    return communicator()


@pytest.fixture
def always(monkeypatch, comm):
    """Groups made from now on use shared memory for every size."""
    monkeypatch.setattr(dist.group.WORLD.cpu.collectives.plans, "thresholds", Thresholds("0"))


def shared_files() -> int:
    """How many mappings of shared files this process has."""
    return sum(
        "/dev/shm" in line or "shared_window" in line for line in Path("/proc/self/maps").read_text().split("\n")
    )


def test_all_ranks_use_what_rank_0_reads(comm, rank, size, tmp_path, monkeypatch):
    """Its own file, which the others do not have; an unreadable one is an error on all of them."""
    library = runtime.load().get_vendor()[0]
    monkeypatch.delenv(threshold_file.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if rank == 0:
        threshold_file.write(threshold_file.users_file(), library, 2, {"broadcast": 12345})
    found = Thresholds.of_rank_0(comm)
    assert found.of("broadcast", torch.float32, None, 1, 2, 2, library) == 12345
    if rank == 0:
        threshold_file.users_file().write_text("not JSON")
    with pytest.raises(ValueError, match="expected the file that `python -m hpcdist tune` wrote"):
        Thresholds.of_rank_0(comm)


def test_tune_writes_a_file_that_later_groups_read(rank, size, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tune, "SIZES", [1 << 14, 1 << 16])
    path = tmp_path / "folder" / "thresholds.json"
    arguments = ["--output", str(path), "--rounds", "1", "--seconds", "0.001"]
    if size == 1:
        with pytest.raises(SystemExit):
            tune.run(arguments)
        return
    assert tune.run(arguments) == 0
    if rank == 0:
        ((of, known),) = threshold_file.read(path).items()
        assert of == topology.processor()
        ((library, places),) = known.items()
        assert library == runtime.load().get_vendor()[0]
        assert places[str(size)].keys() == {*COLLECTIVES, *HALF_ROWS}
        assert str(path) in capfd.readouterr().out


def test_a_window_is_made_only_on_first_use(comm, monkeypatch):
    monkeypatch.setattr(dist.group.WORLD.cpu.collectives.plans, "thresholds", Thresholds())
    group = dist.new_group()
    dist.all_reduce(torch.ones(4), group=group)
    node = group.backend(torch.device("cpu")).collectives.node
    assert node.shared is None
    dist.all_reduce(torch.ones(16 << 20), group=group)
    library = runtime.load().get_vendor()[0]
    at = Thresholds().of("all_reduce", torch.float32, "SUM", 1, comm.size, comm.size, library)
    assert (node.shared is not None) == (at <= 64 << 20)
    if node.shared is not None:
        assert node.shared.window.segment_bytes <= 8 << 20
    dist.destroy_process_group(group)


def test_a_wait_makes_mpi_progress(of_host):
    """Rank 1 waits in shared memory while rank 0 still sends it a message that needs rank 1's MPI to arrive."""
    shared = node_shared(of_host)
    if of_host.size > 1:
        message = torch.full((1 << 20,), float(of_host.rank))
        request = None
        if of_host.rank == 1:
            arrived = torch.empty(1 << 20)
            request = of_host.Irecv(arrived.numpy(), 0, 5)
        if of_host.rank == 0:
            time.sleep(0.05)
            of_host.Ssend(message.numpy(), 1, 5)
        tensor = torch.ones(1000)
        shared.all_reduce(tensor, tensor, ReduceOp.SUM)
        assert tensor[0] == of_host.size
        if request is not None:
            request.Wait()
            assert arrived[0] == 0
    shared.close()


def test_poll_leaves_a_wait(of_host):
    """A mate does not come: what poll raises must end the wait, within milliseconds."""

    class GivenUp(Exception):
        pass

    def poll():
        raise GivenUp

    shared = node_shared(of_host, poll)
    if of_host.size > 1 and of_host.rank == 0:
        tensor = torch.ones(10)
        began = time.monotonic()
        with pytest.raises(GivenUp):
            shared.all_reduce(tensor, tensor, ReduceOp.SUM)
        assert time.monotonic() - began < 10
    of_host.Barrier()
    shared.close()


def test_a_call_left_midway_ends_the_group(comm, always):
    """Its data still lies in the window, where the others would take them for those of the next call."""

    class Left(Exception):
        pass

    def leave(*_):
        raise Left

    group = dist.new_group()
    dist.all_reduce(torch.ones(10), group=group)  # the first call makes the window
    node = group.cpu.collectives.node._places.node
    if comm.size > 1 and comm.rank == 0:
        before = signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(Left):
                dist.all_reduce(torch.ones(10), group=group)
        finally:
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(RuntimeError, match="Left has ended an earlier call of this rank on the group"):
            dist.all_reduce(torch.ones(10), group=group)
    comm.Barrier()
    if comm.rank == 0:  # whose own end finds the difference if the others come first
        with suppress(CallsDifferError):
            dist.destroy_process_group(group)
        assert bool(node) is (comm.size > 1)  # what comes for a communicator that is freed would meet the next one
    else:
        with pytest.raises(CallsDifferError, match=r"rank 0: all_reduce .* has ended in its middle"):
            dist.destroy_process_group(group)


def test_a_first_call_left_midway_ends_the_group(comm, monkeypatch):
    """The others are in the midst of it, and would take its second try for the rest of the first."""
    made = dist.new_group()
    if comm.size > 1 and comm.rank == 0:

        def leave(*given):
            call_board.open_board(*given)
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(call_check, "open_board", leave)
            with pytest.raises(ZeroDivisionError):
                dist.barrier(made)
        with pytest.raises(RuntimeError, match="ZeroDivisionError has ended an earlier call of this rank on the group"):
            dist.barrier(made)
    elif comm.size > 1:
        made.cpu.check._open()
    comm.Barrier()
    made.abort("its first call was left", ends_calls=False)
    dist.destroy_process_group(made)


def test_objects_left_midway_end_the_group(comm, monkeypatch):
    made = dist.new_group()
    dist.broadcast_object_list([1], 0, made)  # makes what the call below needs of all ranks
    if comm.size > 1 and comm.rank == 0:

        def leave(*given):
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(parts, "broadcast", leave)
            with pytest.raises(ZeroDivisionError):
                dist.broadcast_object_list([1], 0, made)
        with pytest.raises(RuntimeError, match="ZeroDivisionError has ended an earlier call of this rank on the group"):
            dist.gather_object(1, [None] * comm.size, 0, made)
    comm.Barrier()
    made.abort("its call was left", ends_calls=False)
    dist.destroy_process_group(made)


def test_what_is_left_of_an_object_meets_no_other_call(comm, monkeypatch):
    """A rank that cannot take what the root sends: its next broadcast took the pickle for its data."""
    made = dist.new_group([0, 1][: comm.size])
    if comm.rank < 2:
        dist.barrier(made)
        objects = [{"lr": 0.1}]
        if comm.rank == 1:

            def leave(part):
                raise MemoryError

            with monkeypatch.context() as patch:
                patch.setattr(parts, "as_buffer", leave)
                with pytest.raises(MemoryError):
                    dist.broadcast_object_list(objects, 0, made)
        else:
            dist.broadcast_object_list(objects, 0, made)
        values = torch.full((1000,), comm.rank)
        dist.broadcast(values, 0, made)
        assert values.eq(0).all()
        if comm.rank == 1:
            with pytest.raises(RuntimeError, match="MemoryError has ended an earlier call of this rank on the group"):
                dist.all_gather_object([None] * 2, 1, made)
    comm.Barrier()
    if comm.rank < 2:
        made.abort("its call was left", ends_calls=False)
        dist.destroy_process_group(made)


def test_waiting_lets_other_threads_run(of_host):
    shared = node_shared(of_host)
    if of_host.size > 1:
        ticks, over = [], threading.Event()

        def tick():
            while not over.is_set():
                ticks.append(time.monotonic())
                time.sleep(0.001)

        if of_host.rank == 0:
            time.sleep(0.2)
            shared.broadcast(torch.ones(100), 0)
        else:
            thread = threading.Thread(target=tick)
            thread.start()
            shared.broadcast(torch.zeros(100), 0)
            over.set()
            thread.join()
            assert len(ticks) > 10
    for _ in range(2):  # it may be called again
        shared.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3, 5), (1000, 101)])
def test_a_list_is_read_where_it_lies_unless_it_is_written(comm, always, dtype, shape):
    group, numel = dist.new_group(), math.prod(shape)
    for shift in (None, *range(0, comm.size * numel, max(1, numel // 2))):  # of the output in the memory of the list
        memory = torch.empty((comm.size + 1) * numel, dtype=dtype)
        shares = [each.view(shape) for each in memory.split(numel)[:-1]]
        for r, share in enumerate(shares):
            share.fill_(10 * r + comm.rank)
        output = torch.empty(shape, dtype=dtype) if shift is None else memory[shift : shift + numel].view(shape)
        dist.reduce_scatter(output, shares, group=group)
        assert (output == 10 * comm.rank * comm.size + sum(range(comm.size))).all()
    dist.destroy_process_group(group)


def test_a_rank_may_destroy_a_group_that_others_keep(comm, always):
    group = dist.new_group()
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, group=group)
    for rank in range(comm.size):
        if rank == comm.rank:
            dist.destroy_process_group(group)
        dist.all_reduce(tensor)  # on the default group, while those after this one have the other group
    assert tensor[-1] == comm.size ** (comm.size + 1)


def test_a_thousand_groups_leave_nothing(comm, always):
    """As many as fit in 8 s, at most 1,000: Open MPI on crowded cores takes 0.1 s for one window."""

    def make(times):
        for _ in range(times):
            group = dist.new_group()
            tensor = torch.ones(1000)
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == comm.size
            dist.destroy_process_group(group)

    make(20)
    files, memory, began, made = shared_files(), resident(), time.monotonic(), 0
    while comm.bcast(made < 1000 and time.monotonic() - began < 8):
        make(10)
        made += 10
    assert shared_files() <= files
    assert resident() - memory < 30 << 20
