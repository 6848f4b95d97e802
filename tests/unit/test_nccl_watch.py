"""The watchdog's view of calls that a device is at."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from hpcdist.backends.nccl import communicators
from hpcdist.backends.nccl.backend import NCCLBackend
from hpcdist.backends.nccl.streams import PendingCall
from hpcdist.core.call import Call
from hpcdist.core.errors import DistBackendError
from hpcdist.core.issue import issue
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.table import ALL_REDUCE, BARRIER
from hpcdist.core.work import Work
from hpcdist.core.world import WORLD
from hpcdist.watch import calls_under_way
from tests.fakes import fake_nccl as fake

SUM = ReduceOp.RedOpType.SUM


def connected(driver: Any = None) -> NCCLBackend:
    backend = NCCLBackend(0, 2, fake.library(driver=driver), None, fake.FakeCuda())
    backend.communicators.make(torch.device("cpu"), 2, 0, [fake.get_unique_id()])
    return backend


def call(backend: NCCLBackend, is_async: bool = False) -> Work | None:
    tensor = torch.ones(2)
    if is_async:
        return backend.start(Call(ALL_REDUCE, tensor, tensor, SUM))
    backend.run(Call(ALL_REDUCE, tensor, tensor, SUM))
    return None


def test_a_call_that_hangs_is_not_hidden_by_those_queued_behind_it() -> None:
    backend = connected()
    streams = backend.communicators.group.streams
    assert backend.outstanding() is None
    call(backend)
    hung = streams._last
    hung.is_complete = False
    seen = backend.outstanding()
    assert seen is not None
    for _ in range(3):
        call(backend)
        assert streams._last is not hung
        assert backend.outstanding() is seen
    hung.is_complete = True
    assert backend.outstanding() is None


def test_an_asynchronous_call_is_seen_until_the_device_is_through() -> None:
    backend = connected()
    first = call(backend, True)
    first.pending.end.is_complete = False
    second = call(backend, True)
    second.pending.end.is_complete = False
    assert backend.outstanding().pending is first.pending
    first.pending.end.is_complete = True
    assert backend.outstanding().pending is second.pending
    second.pending.end.is_complete = True
    assert backend.outstanding() is None
    assert not backend.communicators.group.streams.under_way


@pytest.mark.parametrize("look", [NCCLBackend.pending, NCCLBackend.outstanding])
def test_a_device_that_failed_ends_every_call_with_the_reason(look: Callable[[NCCLBackend], Any]) -> None:
    backend = connected()
    works = [call(backend, True) for _ in range(5)]

    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for work in works:
        work.pending.end.query = fail
    assert not look(backend)
    for work in works:
        with pytest.raises(DistBackendError, match="illegal memory access"):
            work.wait()
    assert not backend.communicators.group.streams._free_events


@pytest.mark.parametrize("ended", [0, 3, 7])
def test_the_calls_that_have_ended_are_let_go_of_and_their_events_used_again(ended: int) -> None:
    backend = connected()
    streams = backend.communicators.group.streams
    works = [call(backend, True) for _ in range(7)]
    for work in works[ended:]:
        work.pending.end.is_complete = False
    ends = [work.pending.end for work in works]
    left = [work.pending for work in works[ended:]]
    assert [each.pending for each in backend.pending()] == list(streams.under_way) == left
    assert list(streams._free_events) == ends[:ended]
    assert [work.is_completed() for work in works] == [True] * ended + [False] * (7 - ended)
    assert [bool(work.pending.keepalive) for work in works] == [False] * ended + [True] * (7 - ended)


def test_a_call_that_is_added_while_the_watchdog_looks_keeps_its_memory() -> None:
    backend = connected()
    first, last = call(backend, True), call(backend, True)
    added = []

    def query() -> bool:
        if not added:
            added.append(call(backend, True))
            added[0].pending.end.is_complete = False
        return True

    first.pending.end.is_complete = True
    last.pending.end.query = query
    assert backend.outstanding().pending is added[0].pending
    assert added[0].pending.keepalive
    assert not added[0].is_completed()


def test_calls_are_added_while_the_watchdog_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = connected()
    works = [call(backend, True) for _ in range(2)]
    for each in works:
        each.pending.end.is_complete = False
    added, look = [], PendingCall.look

    def look_and_add(pending: PendingCall) -> Any:
        if pending is works[1].pending and not added:
            added.append(call(backend, True))
            added[0].pending.end.is_complete = False
        return look(pending)

    monkeypatch.setattr(PendingCall, "look", look_and_add)
    assert [each.pending for each in backend.pending()] == [each.pending for each in works]
    assert [each.pending for each in backend.pending()] == [each.pending for each in (*works, *added)]


def test_calls_that_are_launched_together_give_their_event_back_once() -> None:
    backend = connected()
    with backend.grouped():
        works = [call(backend, True) for _ in range(3)]
    assert len({id(work.pending.end) for work in works}) == 1
    assert backend.pending() == []
    assert list(backend.communicators.group.streams._free_events) == [works[0].pending.end]


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_call_that_is_queued_while_the_watchdog_ends_the_communicator_has_failed(is_grouped: bool) -> None:
    backend = connected()
    streams = backend.communicators.group.streams
    record_end = streams.record_end

    def end_meanwhile() -> Any:
        backend.faults.interrupt("rank 1 never came")
        event = record_end()
        event.is_complete = False
        return event

    streams.record_end = end_meanwhile
    with backend.grouped() if is_grouped else nullcontext():
        work = call(backend, True)
    assert work.is_completed()
    assert not streams.under_way
    with pytest.raises(DistBackendError, match="rank 1 never came"):
        work.wait()


def test_a_call_whose_kernel_ended_by_the_abort_has_failed() -> None:
    backend = connected()
    polled, waited = call(backend, True), call(backend, True)
    polled.pending.end.is_complete = waited.pending.end.is_complete = False
    seen = []

    def abort() -> None:  # the kernels end, and the main thread goes on before the watchdog's does
        polled.pending.end.is_complete = waited.pending.end.is_complete = True
        seen.append((polled.is_success(), polled.exception()))
        with pytest.raises(DistBackendError, match="rank 1 never came"):
            waited.wait()

    backend.communicators.group.comm.abort = abort
    backend.faults.interrupt("rank 1 never came")
    assert seen == [(False, backend.communicators.ended)]


def test_a_call_whose_kernel_was_ended_by_a_shrink_has_failed() -> None:
    backend = connected()
    work = call(backend, True)
    work.pending.end.is_complete = False
    comm = backend.communicators.group.comm
    shrink = comm.shrink

    def end_kernels(*args: Any, **options: Any) -> Any:
        work.pending.end.is_complete = True
        assert backend.pending() == []  # the watchdog looks while the other ranks are waited for
        return shrink(*args, **options)

    comm.shrink = end_kernels
    backend.shrink([1], "less", aborts=True)
    with pytest.raises(DistBackendError, match=r"shrinks the NCCL communicator without ranks \[1\]"):
        work.wait()


def test_a_communicator_is_aborted_once() -> None:
    backend = connected()
    fake.take_journal()
    assert backend.faults.interrupt("rank 1 never came")
    assert backend.faults.interrupt("and nor did rank 2")
    assert fake.take_journal() == [("group", "start"), ("abort", 2), ("group", "end")]
    with pytest.raises(DistBackendError, match="rank 1 never came"):
        call(backend)


def test_all_communicators_are_aborted_in_one_group_call_on_a_thread_that_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = connected()
    communicators = backend.communicators
    pair = communicators.make(torch.device("cpu"), 2, 0, fake.get_unique_id(), 1)
    may_end, threads = threading.Event(), []

    def abort() -> None:  # as one that waits for another rank
        threads.append(threading.current_thread().name)
        fake.JOURNAL.append(("abort", "pair"))
        may_end.wait(10)

    pair.comm.abort = abort
    monkeypatch.setattr("hpcdist.backends.nccl.communicators.ABORT_SECONDS", 0.05)
    fake.take_journal()
    assert backend.faults.interrupt("rank 1 never came")
    with pytest.raises(DistBackendError, match="rank 1 never came"):
        call(backend)
    assert fake.take_journal() == [("group", "start"), ("abort", "pair")]
    may_end.set()
    for thread in threading.enumerate():
        if thread.name in threads:
            thread.join(10)
    assert fake.take_journal() == [("abort", 2), ("group", "end")]


@pytest.mark.parametrize("name", ["split", "shrink", "destroy"])
def test_what_waits_for_the_device_waits_for_the_communicators_calls_only(name: str) -> None:
    backend = connected()
    call(backend)
    ends: dict[str, Callable[[], object]] = {
        "split": lambda: backend.split([[0], [1]], ["a", "b"], timedelta(seconds=5)),
        "shrink": lambda: backend.shrink([1], "c"),
    }
    end = ends.get(name, backend.close)
    backend._cuda.is_capturing = True
    with pytest.raises(DistBackendError, match=f"{name} waits for the device, and a CUDA graph is being captured"):
        end()
    if name == "destroy":
        return
    backend._cuda.is_capturing = False
    fake.take_journal()
    end()
    waits = [entry[2] for entry in fake.take_journal() if entry[:2] == ("host", "waits for")]
    assert waits == ["side", "event on current"]
    backend._cuda.is_capturing = True
    call(backend)  # into a graph, whose replays are behind no event
    backend._cuda.is_capturing = False
    fake.take_journal()
    end()
    assert ("host", "waits for", "device") in fake.take_journal()


def test_a_call_does_not_reach_a_communicator_that_ended_just_before() -> None:
    backend = connected()
    streams = backend.communicators.group.streams
    fork = streams.fork

    def end_first(stream: Any) -> None:
        backend.faults.interrupt("rank 1 never came")
        fork(stream)

    streams.fork = end_first
    fake.take_journal()
    with pytest.raises(DistBackendError, match="rank 1 never came"):
        call(backend, True)
    assert "allreduce" not in [entry[0] for entry in fake.take_journal()]


def test_a_dropped_work_keeps_its_buffers_and_what_runs_behind_it_until_the_device_is_through() -> None:
    backend = connected()
    tensor, staged = torch.ones(2), torch.ones(2)
    watched = [weakref.ref(tensor), weakref.ref(staged)]
    finish = partial(torch.Tensor.copy_, torch.ones(2), staged)
    end = backend.start(Call(ALL_REDUCE, tensor, tensor, SUM, finish=finish)).pending.end
    end.is_complete = False
    del tensor, staged, finish
    assert all(each() is not None for each in watched)
    end.is_complete = True
    assert backend.outstanding() is None
    assert all(each() is None for each in watched)


def test_a_communicator_that_is_made_while_its_group_is_ended_is_aborted() -> None:
    backend = connected()
    backend.faults.interrupt("rank 1 never came")
    fake.take_journal()
    with pytest.raises(DistBackendError, match="rank 1 never came"):
        backend.communicators.adopt(fake.Communicator.init(2, 0, fake.get_unique_id()), torch.device("cpu"))
    assert [entry[0] for entry in fake.take_journal()] == ["init", "abort"]


def test_a_communicator_that_is_made_between_two_looks_of_the_end_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = connected()
    made, streams = fake.Communicator.init(2, 0, fake.get_unique_id()), communicators.Streams

    def interrupted(*args: Any) -> Any:
        backend.faults.interrupt("rank 1 never came")
        return streams(*args)

    monkeypatch.setattr(communicators, "Streams", interrupted)
    fake.take_journal()
    with pytest.raises(DistBackendError, match="rank 1 never came"):
        backend.communicators.adopt(made, torch.device("cpu"), 1)
    assert [entry[0] for entry in fake.take_journal()].count("abort") == 2  # the group's, and it


@pytest.mark.parametrize("name", ["split", "shrink"])
def test_a_communicator_is_not_aborted_while_another_is_made_of_it(name: str) -> None:
    backend = connected()
    comm, threads = backend.communicators.group.comm, []

    def make(*args: Any, **more: Any) -> Any:
        threads.append(threading.Thread(target=backend.faults.interrupt, args=("it takes too long",)))
        threads[0].start()
        threads[0].join(0.05)
        assert threads[0].is_alive()
        assert ("abort", 2) not in fake.JOURNAL
        return "made"

    setattr(comm, name, make)
    fake.take_journal()
    communicators = backend.communicators
    assert (communicators.split(0, 0) if name == "split" else communicators.shrink([1], False)) == "made"
    threads[0].join(5)
    assert ("abort", 2) in fake.take_journal()


def test_communicators_are_forgotten_while_the_watchdog_looks() -> None:
    backend = connected()

    class Peer(int):
        def __lt__(self, other: int) -> bool:  # as the links are put in order
            backend.communicators._forget()
            return False

        __gt__ = __lt__

    backend.communicators.make(torch.device("cpu"), 2, 0, fake.get_unique_id(), Peer(1))
    assert backend.outstanding() is None
    assert backend.pending() == []


def test_an_end_that_has_begun_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = connected()
    comm = backend.communicators.group.comm
    comm.error = 6
    seen = []

    def destroy() -> None:  # as the watchdog's thread does while ncclCommDestroy waits for the other ranks
        seen.append((backend.faults.check_async(), backend.faults.interrupt("it takes too long")))

    backend.communicators.check_async, check = lambda: None, backend.communicators.check_async
    comm.finalize = lambda: setattr(backend.communicators, "check_async", check)
    comm.destroy = destroy
    fake.take_journal()
    backend.close()
    assert seen == [(None, False)]
    assert ("abort", 2) not in fake.take_journal()


def test_a_failure_of_the_end_is_c10ds_error_and_asks_the_communicator_nothing() -> None:
    backend = connected()
    comm = backend.communicators.group.comm
    asked = []

    def fail() -> None:
        raise fake.NCCLError("unhandled system error")

    comm.destroy, comm.get_last_error = fail, lambda: asked.append(1) or "detail"
    with pytest.raises(DistBackendError, match="destroy on rank 0 of 2 failed in NCCL"):
        backend.close()
    assert asked == []
    with pytest.raises(DistBackendError, match="its group is destroyed"):
        call(backend)


def test_the_device_is_waited_for_before_the_end_and_who_was_ended_meanwhile_is_not_touched() -> None:
    backend = connected()
    streams = backend.communicators.group.streams
    streams.side.synchronize = lambda: backend.faults.interrupt("rank 1 never came")
    fake.take_journal()
    with pytest.raises(DistBackendError, match="rank 1 never came"):
        backend.close()
    assert [entry[0] for entry in fake.take_journal()] == ["group", "abort", "group", "host"]


def test_the_barrier_of_an_ended_communicator_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = connected()
    backend._cuda.main.synchronize = lambda: backend.faults.interrupt("rank 1 never came")
    monkeypatch.setattr(fake.Event, "query", lambda self: False)
    with pytest.raises(DistBackendError, match="rank 1 never came"):
        backend.run(Call(BARRIER))


class Mode(Enum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class Driver:
    """What the backend asks of cuda.bindings.driver."""

    CUstreamCaptureMode = Mode

    def __init__(self) -> None:
        self.mode = Mode.CU_STREAM_CAPTURE_MODE_GLOBAL

    def cuThreadExchangeStreamCaptureMode(self, mode: Mode) -> tuple[int, Mode]:
        before, self.mode = self.mode, mode
        return 0, before


@pytest.mark.parametrize("ask", ["outstanding", "pending"])
def test_events_are_asked_for_so_that_another_threads_capture_goes_on(ask: str) -> None:
    driver = Driver()
    backend = connected(driver)
    work = call(backend, True)
    asked = []
    work.pending.end.query = lambda: asked.append(driver.mode) or False
    getattr(backend, ask)()
    assert set(asked) == {Mode.CU_STREAM_CAPTURE_MODE_RELAXED}
    assert driver.mode is Mode.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_what_a_device_is_at_is_under_way_with_its_own_record() -> None:
    backend = connected()
    group = ProcessGroup((0, 1), 0, {"cpu": backend}, "cpu:nccl", "dp", "", timedelta(seconds=5))
    WORLD.groups["dp"] = group
    try:
        issue(ALL_REDUCE, group, tensor := torch.ones(4), tensor, SUM)
        assert list(calls_under_way.under_way()) == []
        backend.communicators.group.streams._last.is_complete = False
        (each,) = calls_under_way.under_way()
        assert (each.call.name, each.call.number, list(each.call.shape)) == ("all_reduce", 1, [4])
        assert each.in_background
        assert not each.has_ended()
        group.journal.collective("barrier")  # on the group's other backend: not what the device is at
        (again,) = calls_under_way.under_way()
        assert again.record is each.record
        each.work.pending.end.is_complete = True
        assert each.has_ended()
        assert list(calls_under_way.under_way()) == []
    finally:
        del WORLD.groups["dp"]
