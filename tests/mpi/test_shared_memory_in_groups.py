"""Does the MPI backend use shared memory where it should, survive being interrupted, and give everything back?"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import ReduceOp

pytest.importorskip("mpi4py")
import hpcdist as dist
from hpcdist.backends.mpi import crossover, runtime
from hpcdist.backends.mpi.shared_memory import NodeShared
from hpcdist.backends.mpi.sharing import SHARED_CALLS

SEED = 21


@pytest.fixture(scope="module")
def comm(_default_group):
    try:
        return dist.get_mpi_comm()
    except Exception:
        pytest.skip("no MPI in this backend")


@pytest.fixture
def always(monkeypatch, comm):
    monkeypatch.setenv(crossover.VARIABLE, "0")


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def shared_files() -> int:
    """How many mappings of shared files this process has."""
    return sum(
        "/dev/shm" in line or "shared_window" in line for line in Path("/proc/self/maps").read_text().split("\n")
    )


def test_override():
    known = {"0": (1,), "64K": (65536,), "4M": (4 << 20,), "off": (), "OFF": (), "": None, "a.json": None}
    assert {text: crossover.override(text) for text in known} == known
    with pytest.raises(ValueError, match="number of bytes such as 65536"):
        crossover.override("lots")


def test_a_file_stands_in_for_the_table(monkeypatch, tmp_path):
    path = str(tmp_path / "crossovers.json")
    names = crossover.BYTES["MPICH"][2]
    crossover.write(path, "Some MPI", 2, dict.fromkeys(names, (1 << 14, 1 << 20)))
    crossover.write(path, "Some MPI", 8, dict.fromkeys(names, ()))
    monkeypatch.setenv(crossover.VARIABLE, path)
    for ranks, at in ((2, (1 << 14, 1 << 20)), (3, (1 << 14, 1 << 20)), (5, ()), (64, ())):
        assert crossover.switches("all_reduce", torch.float32, "SUM", ranks, "Some MPI") == at
    table = crossover.BYTES["Open MPI"][2]  # what the file does not tell
    assert crossover.switches("broadcast", torch.float32, None, 2, "Open MPI") == table["broadcast"]
    for nbytes, expected in ((1, False), (1 << 14, True), ((1 << 20) - 1, True), (1 << 20, False), (1 << 30, False)):
        assert crossover.is_shared(nbytes, (1 << 14, 1 << 20)) is expected
        assert crossover.is_shared(nbytes, ()) is False
    for content in ("not JSON", "[]", '{"Some MPI": {"two": {}}}'):
        wrong = tmp_path / "wrong.json"
        wrong.write_text(content)
        crossover.read.cache_clear()
        with pytest.raises(ValueError, match="expected the file that"):
            crossover.measured("Some MPI", 2, str(wrong))
    with pytest.raises(ValueError, match="No such file"):
        crossover.measured("Some MPI", 2, str(tmp_path / "absent.json"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("library", [*crossover.BYTES, "another"])
def test_the_floor_keeps_out_nothing_that_the_table_lets_in(library, ranks):
    for row in SHARED_CALLS:
        op = "SUM" if row.reduces else None
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
            for least in crossover.switches(row.name, dtype, op, ranks, library)[:1]:
                sent = least // ranks if row.name == "all_gather_single" else least
                assert crossover.floor_bytes(row, ranks, library) <= sent


def test_a_window_is_made_on_first_use_alone(comm, monkeypatch):
    monkeypatch.delenv(crossover.VARIABLE, raising=False)
    group = dist.new_group()
    dist.all_reduce(torch.ones(4), group=group)
    backend = group.backend(torch.device("cpu"))
    assert backend.sharing.shared is None
    dist.all_reduce(torch.ones(4 << 20), group=group)
    library = runtime.load().get_vendor()[0]
    at = crossover.switches("all_reduce", torch.float32, "SUM", comm.size, library)
    assert (backend.sharing.shared is not None) == crossover.is_shared(16 << 20, at)
    if backend.sharing.shared is not None:
        assert backend.sharing.shared.window.segment_bytes <= 8 << 20
    dist.destroy_process_group(group)


def test_a_wait_makes_mpi_progress(comm):
    """Rank 1 waits in shared memory while rank 0 still sends it a message that needs rank 1's MPI to arrive."""
    shared = NodeShared(comm)
    if comm.size > 1:
        message = torch.full((1 << 20,), float(comm.rank))
        request = None
        if comm.rank == 1:
            arrived = torch.empty(1 << 20)
            request = comm.Irecv(arrived.numpy(), 0, 5)
        if comm.rank == 0:
            time.sleep(0.05)
            comm.Ssend(message.numpy(), 1, 5)
        tensor = torch.ones(1000)
        shared.all_reduce(tensor, tensor, ReduceOp.SUM)
        assert tensor[0] == comm.size
        if request is not None:
            request.Wait()
            assert arrived[0] == 0
    shared.close()


def test_poll_leaves_a_wait(comm):
    """A mate does not come: what poll raises must end the wait, within milliseconds."""

    class GivenUp(Exception):
        pass

    def poll():
        raise GivenUp

    shared = NodeShared(comm)
    if comm.size > 1 and comm.rank == 0:
        shared.poll = poll
        tensor = torch.ones(10)
        began = time.monotonic()
        with pytest.raises(GivenUp):
            shared.all_reduce(tensor, tensor, ReduceOp.SUM)
        assert time.monotonic() - began < 1
    comm.Barrier()
    shared.close()


def test_waiting_lets_other_threads_run(of_host):
    shared = NodeShared(of_host)
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
    shared.close()


def test_close_is_idempotent(comm):
    shared = NodeShared(comm)
    shared.close()
    shared.close()


def test_sync_and_async_calls_on_several_groups(comm, always):
    """Queued calls and calls in place keep their order on each group."""
    chance = random.Random(SEED)
    groups = [dist.new_group() for _ in range(3)]
    pending = []
    for _ in range(100):
        group = chance.choice(groups)
        tensor = torch.full((chance.choice([3, 10_000, 300_000]),), float(comm.rank + 1))
        work = dist.all_reduce(tensor, group=group, async_op=chance.random() < 0.5)
        pending.append((work, tensor))
    for work, tensor in pending:
        if work is not None:
            work.wait()
        assert (tensor == comm.size * (comm.size + 1) / 2).all()
    for group in groups:
        dist.destroy_process_group(group)


def test_ten_thousand_mixed_calls(comm, always):
    chance, size, rank = random.Random(SEED), comm.size, comm.rank
    # more ranks than cores: a call then waits for the scheduler, not for us
    calls = 10_000 if size <= (os.cpu_count() or 1) else 1_000
    group = dist.new_group()
    for i in range(calls):
        numel, what = chance.choice([1, 7, 100, 3000]), chance.randrange(4)
        if what == 0:
            tensor = torch.full((numel,), float(rank + i % 3))
            dist.all_reduce(tensor, group=group)
            assert tensor[-1] == size * (size - 1) / 2 + size * (i % 3)
        elif what == 1:
            tensor = torch.full((numel,), rank)
            dist.broadcast(tensor, i % size, group=group)
            assert tensor[-1] == i % size
        elif what == 2:
            tensor = torch.empty(numel * size)
            dist.all_gather_into_tensor(tensor, torch.full((numel,), float(rank)), group=group)
            assert tensor[-1] == size - 1
        else:
            tensor = torch.empty(numel)
            dist.reduce_scatter_tensor(tensor, torch.full((numel * size,), float(rank)), group=group)
            assert tensor[-1] == size * (size - 1) / 2
    dist.destroy_process_group(group)


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
