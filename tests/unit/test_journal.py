"""Calls that block at the same time on one group, on several threads or inside of each other."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpcdist.backends.loopback import LoopbackBackend
from hpcdist.core import journal as journal_module
from hpcdist.core.issue import issue
from hpcdist.core.journal import RING, CallRecord, Journal
from hpcdist.core.point_to_point import isend
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.table import ALL_REDUCE
from hpcdist.core.work import Work
from hpcdist.core.world import WORLD
from hpcdist.watch.calls_under_way import under_way

HERE = threading.get_ident()


def names(journal: Journal) -> list[str]:
    return [each.call[2] for each in journal.blocked()]


def test_a_call_that_ends_leaves_the_marks_of_others() -> None:
    journal = Journal("0")
    ended, began, may_end = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        with journal.during("barrier"):
            began.set()
            may_end.wait()
        ended.set()

    with journal.during("gather_object"):
        thread = threading.Thread(target=block)
        thread.start()
        began.wait()
        assert names(journal) == ["gather_object", "barrier"]
        assert [each.thread for each in journal.blocked()] == [HERE, thread.ident]
    assert names(journal) == ["barrier"]
    with journal.during("send", 1):  # it finds no mark of the first one
        may_end.set()
        ended.wait()
        thread.join()
        assert names(journal) == ["send"]
    assert names(journal) == []


def test_of_calls_inside_of_each_other_the_innermost_blocks() -> None:
    journal = Journal("0")
    with journal.during("new_group"):
        with journal.during("barrier"), journal.during("send", 1):
            assert names(journal) == ["send"]
        assert names(journal) == ["new_group"]
    assert names(journal) == []


def test_the_innermost_call_of_a_thread_is_found_though_the_first_mark_is_free_again() -> None:
    journal = Journal("0")
    first = journal.blocking(journal.message("send", None, None, 1))
    with journal.during("new_group"):
        first.__exit__(None, None, None)  # as another thread's call may end
        with journal.during("barrier"):
            assert names(journal) == ["barrier"]


@pytest.mark.parametrize("way", ["run", "blocking"])
def test_another_thread_begins_to_block_just_before_the_mark(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal("0")
    own, theirs = journal.message("send", None, None, 1), journal.message("recv", None, None, 1)

    def switch_threads() -> int:  # Python may, whenever a function is called
        journal.current = theirs, None, HERE + 1, None
        return HERE

    monkeypatch.setattr(journal_module, "get_ident", switch_threads)
    seen: list[str] = []
    if way == "run":
        journal.run(own, lambda _: seen.extend(names(journal)), None)
    else:
        with journal.blocking(own):
            seen.extend(names(journal))
    assert seen == ["recv", "send"]
    assert names(journal) == ["recv"]


class Seen(LoopbackBackend):
    """Keeps what blocks while it runs a call."""

    def run(self, call: Any) -> None:
        """Run a call."""
        self._look()
        super().run(call)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int, finish: object = None) -> Work:
        """Begin to send."""
        self._look()
        return super().isend(tensor, dst, tag)

    def _look(self) -> None:
        self.seen = [(each.thread, each.is_own()) for each in WORLD.groups["0"].journal.blocked()]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> ProcessGroup:
    made = ProcessGroup((0,), 0, {"cpu": Seen()}, "loopback", "0", "", timedelta(seconds=10))
    monkeypatch.setattr(WORLD, "groups", {"0": made})
    return made


def test_a_message_that_may_wait_for_its_peer_is_seen(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    isend(torch.ones(1), 0, group)
    assert group.cpu.seen == [(HERE, True)]
    monkeypatch.setattr(Seen, "begins_at_once", True)
    isend(torch.ones(1), 0, group)
    assert group.cpu.seen == []


class Waited(Work):
    """A Work whose wait shows what blocks meanwhile."""

    def _block(self, seconds: float | None) -> bool:
        self.seen = list(under_way())
        self._done = True
        return True


def test_each_wait_keeps_its_own_limit(group: ProcessGroup) -> None:
    with group.journal.during("barrier"):
        limits = []
        for timeout in (timedelta(seconds=3), timedelta(0)):
            work = Waited([])
            work._call = group.journal.message("irecv", None, None, 0)
            thread = threading.Thread(target=work.wait, args=(timeout,))
            thread.start()
            thread.join()
            assert [each.call.name for each in work.seen] == ["barrier", "irecv"]
            assert work.seen[0].limit is None
            limits.append(work.seen[1].limit)
    assert limits == [3.0, None]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_collective_beside_another_threads_call(group: ProcessGroup, is_async: bool) -> None:
    """The fast way has one place for its mark."""
    values = torch.ones(3)
    for _ in range(200):  # so that its call is known
        issue(ALL_REDUCE, group, values, values, torch.distributed.ReduceOp.SUM, None, is_async)
    with group.journal.during("barrier"):
        mark = group.journal.current
        thread = threading.Thread(
            target=issue, args=(ALL_REDUCE, group, values, values, torch.distributed.ReduceOp.SUM, None, is_async)
        )
        thread.start()
        thread.join()
        assert group.journal.current is mark
        assert names(group.journal) == ["barrier"]


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(6)[::2]], ids=["plain", "strided"])
def test_a_call_names_its_thread(group: ProcessGroup, value: torch.Tensor) -> None:
    """Also on the fast way, so that a report finds its line."""
    arguments = (ALL_REDUCE, group, value, value, torch.distributed.ReduceOp.SUM, None, False)
    thread = threading.Thread(target=issue, args=arguments)
    thread.start()
    thread.join()
    assert group.cpu.seen == [(thread.ident, True)]


def test_a_known_call_that_is_refused_gives_its_number_to_the_next(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the fast way too."""
    values = torch.ones(3)

    def call() -> None:
        issue(ALL_REDUCE, group, values, values, torch.distributed.ReduceOp.SUM, None, False)

    for _ in range(200):  # so that the call is known
        call()
    number, last = group.journal.sequence, RING.last()
    with monkeypatch.context() as patch:
        patch.setattr(Seen, "run", lambda self, made: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            call()
    assert group.journal.sequence == number
    assert RING.last() is last
    call()
    assert RING.last()[1] == number + 1


def limit_of_last() -> float | None:
    last = RING.last()
    assert last is not None
    return CallRecord(*last).limit


def test_a_method_gives_its_call_a_limit(group: ProcessGroup) -> None:
    """By an options object or by itself; c10d's -1 ms stands for the group's."""
    tensor, options = torch.ones(2), torch.distributed.AllreduceOptions()
    group.allreduce([tensor], options).wait()
    assert limit_of_last() is None
    options.timeout = timedelta(seconds=1)
    group.allreduce([tensor], options).wait()
    assert limit_of_last() == 1
    group.allreduce(tensor, torch.distributed.ReduceOp.SUM, timedelta(seconds=2)).wait()
    assert limit_of_last() == 2
    group.allgather([[tensor.clone()]], [tensor], timeout=timedelta(seconds=3)).wait()
    assert limit_of_last() == 3
    group.all_to_all_single(tensor.clone(), tensor, [], [], timeout=timedelta(seconds=4)).wait()
    assert limit_of_last() == 4
    group.barrier().wait()
    assert limit_of_last() is None
    assert not group.journal.asked


class Mode(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_so_do_a_method_below_a_mode_and_an_operator(group: ProcessGroup) -> None:
    tensor, options = torch.ones(2), torch.distributed.BroadcastOptions()
    options.timeout = timedelta(seconds=5)
    with Mode():
        group.broadcast([tensor], options).wait()
    assert limit_of_last() == 5
    torch.ops.c10d.broadcast_([tensor], group.boxed(), 0, 0, True, 6000)
    assert limit_of_last() == 6
    torch.ops.c10d.broadcast_([tensor], group.boxed(), 0, 0, True, -1)
    assert limit_of_last() is None


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_a_call_that_the_library_refuses_is_refused_at_once_and_not_counted(
    group: ProcessGroup, step: int, is_async: bool
) -> None:
    """The fast way asks the library, the other one asks before it stages a copy or queues the call."""
    values = torch.ones(4)[::step]
    with pytest.raises((ValueError, RuntimeError, TypeError), match=r"BAND|float"):
        issue(ALL_REDUCE, group, values, values, torch.distributed.ReduceOp.BAND, None, is_async)
    with pytest.raises(RuntimeError, match="non-empty"):
        group.allreduce([])
    assert group.journal.sequence == 0
