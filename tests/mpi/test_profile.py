"""``profile``: what is recorded, on one clock, and that nothing is left on afterwards."""

import io
import json
import sys
import time

import pytest
import torch

import hpcdist as dist
from hpcdist.core import hooks
from tests.unit.test_timeline import check_trace

NAP = 0.3


@pytest.fixture
def path(world, rank, tmp_path):
    told = [str(tmp_path / "trace.json") if rank == 0 else None]
    dist.broadcast_object_list(told, 0)
    return told[0]


def line():
    return f"{__file__.rpartition('/')[2]}:{sys._getframe(1).f_lineno}"


def test_every_kind_of_call_with_its_line_and_size(rank, size, path):
    before, after = (rank - 1) % size, (rank + 1) % size
    with dist.profile(path, show=False) as seen:
        dist.all_reduce(torch.ones(10)), (reduced := line())
        dist.barrier()
        dist.all_gather_object([None] * size, rank)
        dist.all_reduce_coalesced([torch.ones(3), torch.ones(4)])
        dist.broadcast(torch.ones(5), 0, async_op=True).wait()
        sent = dist.isend(torch.ones(7), after)
        dist.irecv(torch.empty(7), before).wait(), (received := line())
        sent.wait()
        dist.all_gather_varied(torch.ones(rank + 1))
    found = {}
    for call in seen.calls:
        found.setdefault(call.name, []).append(call)
        assert call.begin <= call.end
    assert {"all_reduce", "barrier", "all_gather_object", "broadcast", "isend", "irecv"} <= found.keys()
    first, *joined = found["all_reduce"]
    assert (first.nbytes, first.group, first.kind, first.is_async) == (40, "0", "collective", False)
    assert first.where.startswith(reduced)
    assert sum(call.nbytes for call in joined) == 28  # NCCL takes them one by one
    assert found["broadcast"][0].is_async
    assert [(each.nbytes, each.peer, each.kind) for each in found["isend"] if each.kind != "wait"] == [
        (28, after, "message")
    ]
    assert all(each.where.startswith(received) for each in found["irecv"])
    numbers = sorted(each.number for each in seen.calls if each.kind == "collective")
    assert numbers == list(range(first.number, first.number + len(numbers)))
    if rank == 0:
        with open(path) as file:
            check_trace(json.load(file)["traceEvents"], size)
        row = next(row for row in seen.rows() if row.where.startswith(reduced))
        assert (row.call, row.calls, row.nbytes) == ("all_reduce", size, 40 * size)
        assert f"{size} rank" in seen.table()
    else:
        assert (seen.timeline, seen.rows(), seen.ranks(), seen.table()) == (None, [], [], "")


def test_a_locale_without_its_characters(rank, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with dist.profile():
        dist.barrier()
    assert (b"median ?s" in written.getvalue()) == (rank == 0)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_who_makes_the_others_wait_whatever_their_clocks_say(rank, size, is_elsewhere, monkeypatch):
    if size == 1 or torch.empty(0).is_cuda:
        pytest.skip("nobody waits: the host queues calls of a GPU")
    true_time = time.perf_counter_ns
    if is_elsewhere:  # another host's clock, which runs fast too
        monkeypatch.setattr(time, "perf_counter_ns", lambda: int(true_time() * (1 + 1e-4 * rank)) + rank * 10**12)
    with dist.profile(show=False) as seen:
        for _ in range(3):
            if rank == size - 1:
                time.sleep(NAP)
            dist.all_reduce(torch.ones(1))
    if rank == 0:
        *others, late = seen.ranks()
        assert late.last == 3
        assert 0.8 * 3 * NAP * (size - 1) < late.made_wait
        assert late.waiting < NAP
        assert all(row.last == 0 and 0.8 * 3 * NAP < row.waiting <= row.seconds for row in others)
        assert seen.rows()[0].waiting > 0.8 * 3 * NAP * (size - 1) / size


def test_a_wait_is_a_row_of_its_own(rank, size):
    if size == 1 or torch.empty(0).is_cuda:
        pytest.skip("nobody waits: the host queues calls of a GPU")
    with dist.profile(show=False) as seen:
        if rank == 0:
            time.sleep(NAP)
            dist.send(torch.ones(1), 1)
        elif rank == 1:
            work = dist.irecv(torch.empty(1), 0)
            work.wait(), (waited := line())
            work.wait()
    if rank == 1:
        wait, receive = sorted(seen.calls, key=lambda call: call.kind, reverse=True)
        assert (wait.kind, receive.kind, wait.name) == ("wait", "message", "irecv")
        assert wait.where.startswith(waited)
        assert wait.end - wait.begin > 0.8 * NAP * 1e9
        assert (wait.is_async, receive.is_async) == (False, True)


def test_subgroups_are_told_apart(rank, size):
    group = dist.new_group([0])
    with dist.profile(show=False) as seen:
        dist.barrier()
        if rank == 0:
            dist.barrier(group)
    assert len({call.group for call in seen.calls}) == (2 if rank == 0 else 1)
    if rank == 0:
        assert seen.timeline.shares[0].groups == {"0": tuple(range(size)), group.group_name: (0,)}
    dist.destroy_process_group(group)


def test_a_call_that_has_not_ended_is_there(rank, size):
    buffer = torch.empty(3)
    if buffer.is_cuda:
        pytest.skip("NCCL runs what follows behind the receive")
    with dist.profile(show=False) as seen:
        work = dist.irecv(buffer, (rank - 1) % size)
    sent = dist.isend(torch.ones(3), (rank + 1) % size)
    work.wait()
    sent.wait()
    assert [(call.name, call.nbytes, call.is_async) for call in seen.calls] == [("irecv", 12, True)]


def test_two_at_once_and_none_afterwards(world):
    before = hooks.is_profiled()
    plain_wait = dist.Work.wait
    with dist.profile(show=False) as outer:
        with dist.profile(show=False) as inner:
            dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(4))
    assert [call.nbytes for call in inner.calls] == [8]
    assert [call.nbytes for call in outer.calls if call.name == "all_reduce"] == [8, 12]
    assert hooks.is_profiled() == before is False
    assert dist.Work.wait is plain_wait


def test_an_exception_leaves_nothing_on_and_waits_for_nobody(world, rank):
    with pytest.raises(KeyError), dist.profile(show=False):
        raise KeyError(rank)
    assert not hooks.is_profiled()
    dist.barrier()


def test_a_file_that_cannot_be_written_is_told_to_all_ranks_at_once(world):
    with pytest.raises(OSError, match=r"rank 0 cannot write the timeline: .*nowhere"), dist.profile("/nowhere/trace"):
        raise AssertionError("the block must not begin")
    dist.barrier()


def test_it_prints_its_table_once(rank, capsys):
    with dist.profile():
        dist.barrier()
    assert ("barrier" in capsys.readouterr().out) == (rank == 0)
