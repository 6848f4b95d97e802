"""The watchdog's view of calls that a device is at, and threads that meet at the end of communicators.

What another thread would do at the worst moment is done there by a function that stands in for one of the
communicator's or of a stream's.
"""

import threading
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import pytest
import torch

import hpcdist as dist
from hpcdist.backends.nccl import communicators
from hpcdist.backends.nccl.backend import NCCLBackend
from hpcdist.backends.nccl.library import load
from hpcdist.core.call import Call
from hpcdist.core.table import BARRIER, BROADCAST
from hpcdist.watch import calls_under_way

LATE = "rank 1 never came"


@pytest.fixture
def group(connect):
    return connect()


@pytest.fixture
def backend(group):
    return group.backend("cuda")


@pytest.fixture
def link(backend):
    return backend.communicators.group


@pytest.fixture
def call(group, device):
    tensor = torch.ones(2, device=device)
    return lambda is_async=True: dist.all_reduce(tensor, group=group, async_op=is_async)


def test_a_call_that_hangs_is_not_hidden_by_those_queued_behind_it(backend, link, call, gate):
    assert backend.outstanding() is None
    gate.close()
    call(False)
    hung = backend.outstanding()
    assert hung is not None
    for _ in range(3):
        call(False)
        assert backend.outstanding() is hung
        assert link.streams._last is not hung.pending.end  # which would end with the later call
    gate.open()
    torch.cuda.synchronize()
    assert backend.outstanding() is None


def test_calls_that_have_ended_are_let_go_of_and_their_events_used_again(backend, link, call, gate):
    works = [call() for _ in range(3)]
    torch.cuda.synchronize()
    gate.close()
    works += [call() for _ in range(4)]
    assert backend.outstanding().pending is works[3].pending
    assert [each.pending for each in backend.pending()] == list(link.streams.under_way)
    assert list(link.streams.under_way) == [work.pending for work in works[3:]]
    assert list(link.streams._free_events) == [work.pending.end for work in works[:3]]
    assert [work.is_completed() for work in works] == [True] * 3 + [False] * 4
    assert [bool(work.pending.keepalive) for work in works] == [False] * 3 + [True] * 4
    gate.open()


def test_calls_that_are_launched_together_give_their_event_back_once(group, backend, link, device):
    tensors = [torch.ones(2, device=device) for _ in range(3)]
    with group.grouped():
        works = [dist.all_reduce(each, group=group, async_op=True) for each in tensors]
        with pytest.raises(dist.DistBackendError, match="wait after it"):
            works[0].wait()
    torch.cuda.synchronize()
    assert backend.pending() == []
    assert list(link.streams._free_events) == [works[0].pending.end]


@pytest.mark.parametrize("ends", [True, False])
def test_a_call_that_is_added_while_the_watchdog_looks_keeps_its_memory(ends, backend, call, gate):
    gate.close()
    works, asked = [call(), call()], []

    def query():
        asked.append(1)
        if len(asked) == 2 - ends:  # it looks for those that have ended, and then at what is left
            works.append(call())
        return ends

    works[0].pending.end.query = query
    backend.pending()
    assert [each.pending for each in backend.pending()] == [each.pending for each in works[ends:]]
    assert len(works) == 3
    assert all(each.pending.keepalive for each in works[ends:])
    gate.open()


@pytest.mark.parametrize("look", [NCCLBackend.pending, NCCLBackend.outstanding])
def test_a_device_that_failed_ends_every_call_with_the_reason(look, backend, link, call):
    works = [call() for _ in range(5)]

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for work in works:
        work.pending.end.query = fail
    assert not look(backend)
    for work in works:
        with pytest.raises(dist.DistBackendError, match="illegal memory access"):
            work.wait()
    assert not link.streams._free_events


def test_what_a_device_is_at_is_under_way_with_its_own_record(group, call, gate):
    def under_way():
        return [each for each in calls_under_way.under_way() if each.group is group]

    assert under_way() == []
    gate.close()
    call(False)
    (each,) = under_way()
    assert (each.call.name, each.call.number, list(each.call.shape)) == ("all_reduce", 2, [2])
    assert each.in_background
    assert not each.has_ended()
    group.journal.collective("barrier")  # on the group's other backend: not what the device is at
    (again,) = under_way()
    assert again.record is each.record
    gate.open()
    torch.cuda.synchronize()
    assert each.has_ended()
    assert under_way() == []


def test_errors_of_nccl_are_c10ds(backend, link, device, rank, size, monkeypatch):
    tensor = torch.ones(2, device=device)
    with pytest.raises(dist.DistBackendError, match=rf"broadcast on rank {rank} of {size} failed in NCCL \d"):
        backend.run(Call(BROADCAST, tensor, tensor, None, size))
    monkeypatch.setattr(link.comm, "get_async_error", lambda: communicators.IN_PROGRESS)
    assert backend.faults.check_async() is None
    monkeypatch.setattr(link.comm, "get_async_error", lambda: 6)
    assert f"NCCL reports remote process exited or there was a network error on rank {rank}" in str(
        backend.faults.check_async()
    )


# -- calls beside an interruption --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_call_that_is_queued_while_the_watchdog_ends_the_communicator_has_failed(
    is_grouped, group, backend, link, call, gate, monkeypatch
):
    streams = link.streams
    behind = streams.event_behind
    monkeypatch.setattr(
        streams,
        "event_behind",
        lambda of: behind(of) if of is not streams.side or backend.faults.interrupt(LATE) else 0,
    )
    gate.close()
    with group.grouped() if is_grouped else nullcontext():
        work = call()
    assert work.is_completed()
    assert not link.streams.under_way
    with pytest.raises(dist.DistBackendError, match=LATE):
        work.wait()
    with pytest.raises(RuntimeError, match=LATE) as caught:
        work.get_future().value()
    assert caught.type is RuntimeError  # ``set_exception`` would leave the DistBackendError, on which DDP crashes
    gate.open()


def test_a_call_that_blocks_in_nccl_until_the_watchdog_ends_the_communicator_raises_the_reason(backend):
    """As the first one with a rank does, which connects the two."""

    def blocks(stream):
        assert backend.faults.interrupt(LATE)
        raise load().bindings.NCCLError(3)

    with pytest.raises(dist.DistBackendError, match=LATE):
        backend.communicators.launch("all_reduce", blocks, 0)


def test_a_call_does_not_reach_a_communicator_that_ended_just_before(backend, link, call, monkeypatch):
    fork = link.streams.fork
    monkeypatch.setattr(link.streams, "fork", lambda stream: backend.faults.interrupt(LATE) and fork(stream))
    with pytest.raises(dist.DistBackendError, match=LATE):
        call()


def test_calls_that_an_abort_ends_have_failed_while_it_goes_on_and_after_it(backend, link, call, gate, monkeypatch):
    gate.close()
    polled, waited, hung = call(), call(), call()
    abort, seen = link.comm.abort, []

    def end_kernels():  # and the main thread goes on before the watchdog's does
        polled.pending.end.query = waited.pending.end.query = lambda: True
        seen.append((polled.is_success(), polled.exception()))
        with pytest.raises(dist.DistBackendError, match=LATE):
            waited.wait()
        seen.append(abort())

    monkeypatch.setattr(link.comm, "abort", end_kernels)
    assert hung._interrupt(LATE)
    assert seen == [(False, backend.communicators.ended), None]
    assert hung.is_completed()  # before the device has come past it
    assert backend.pending() == []
    gate.open()


def test_the_barrier_of_an_ended_communicator_raises(backend, link, gate, monkeypatch):
    current = link.streams.current()
    monkeypatch.setattr(current, "synchronize", lambda: backend.faults.interrupt(LATE))
    gate.close()
    with pytest.raises(dist.DistBackendError, match=LATE):
        backend.run(Call(BARRIER))
    gate.open()


def test_communicators_are_aborted_in_one_group_call_that_is_not_waited_for_without_end(
    backend, call, alone, rank, device, monkeypatch
):
    backend.communicators.adopt(alone, device, rank)  # the first to be ended
    group_call, abort = load().core.group, alone.abort
    may_end, log = threading.Event(), []

    @contextmanager
    def group():
        log.append("start")
        with group_call():
            yield
        log.append("end")

    def wait_for_another_rank():
        log.append(threading.current_thread())
        may_end.wait(10)
        log.append(abort())

    monkeypatch.setattr(load().core, "group", group)
    monkeypatch.setattr(alone, "abort", wait_for_another_rank)
    monkeypatch.setattr(communicators, "ABORT_SECONDS", 0.05)
    assert backend.faults.interrupt(LATE)
    with pytest.raises(dist.DistBackendError, match=LATE):
        call()
    start, thread = log
    may_end.set()
    thread.join(10)
    assert log == [start, thread, None, "end"]


@pytest.mark.parametrize("is_between", [False, True])
def test_a_communicator_that_is_made_while_its_group_is_ended_is_aborted(
    is_between, backend, alone, rank, device, monkeypatch
):
    streams, abort, aborted = communicators.Streams, alone.abort, []
    if is_between:  # two looks at the end
        monkeypatch.setattr(communicators, "Streams", lambda *args: backend.faults.interrupt(LATE) and streams(*args))
    else:
        backend.faults.interrupt(LATE)
    monkeypatch.setattr(alone, "abort", lambda: aborted.append(abort()))
    with pytest.raises(dist.DistBackendError, match=LATE):
        backend.communicators.adopt(alone, device, rank)
    assert aborted == [None]


@pytest.mark.parametrize("name", ["split", "shrink"])
def test_a_communicator_is_not_aborted_while_another_is_made_of_it(name, backend, link, monkeypatch):
    thread = threading.Thread(target=backend.faults.interrupt, args=(LATE,))

    def make(*args, **more):
        thread.start()
        thread.join(0.05)
        return thread.is_alive()

    monkeypatch.setattr(link.comm, name, make)
    assert backend.communicators.split(0, 0, None) if name == "split" else backend.communicators.shrink([1], False)
    thread.join(10)
    assert LATE in str(backend.communicators.ended)


# -- the end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["split", "shrink", "destroy"])
def test_what_waits_for_the_device_is_an_error_inside_a_capture(name, backend, size, device):
    ends = {
        "split": lambda: backend.split([[0]], ["a"], timedelta(5)),
        "shrink": lambda: backend.shrink([size], "b", False),
    }
    tensor = torch.ones(1, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensor += 1
        with pytest.raises(dist.DistBackendError, match=f"{name} waits for the device, and a CUDA graph is being"):
            ends.get(name, backend.close)()


def test_who_was_ended_while_the_device_was_waited_for_is_not_touched(backend, link, monkeypatch):
    monkeypatch.setattr(link.streams.side, "synchronize", lambda: backend.faults.interrupt(LATE))
    with pytest.raises(dist.DistBackendError, match=LATE):
        backend.close()


def test_an_end_that_has_begun_is_left_alone(backend, link, monkeypatch):
    destroy, seen = link.comm.destroy, []

    def look():  # as the watchdog's thread does while ncclCommDestroy waits for the other ranks
        link.comm.get_async_error = lambda: 6
        seen.append((backend.faults.check_async(), backend.faults.interrupt("it takes too long")))
        destroy()

    monkeypatch.setattr(link.comm, "destroy", look)
    backend.close()
    assert seen == [(None, False)]


def test_a_failure_of_the_end_is_c10ds_error_and_asks_the_communicator_nothing(
    backend, link, call, alone, rank, device, monkeypatch
):
    backend.communicators.adopt(alone, device, rank)  # the first to be ended
    asked, destroy = [], alone.destroy

    def fail():
        destroy()
        raise load().bindings.NCCLError(2)

    monkeypatch.setattr(alone, "destroy", fail)
    monkeypatch.setattr(link.comm, "get_last_error", lambda: asked.append(1))
    with pytest.raises(dist.DistBackendError, match=r"destroy on rank \d of \d failed in NCCL"):
        backend.close()
    assert asked == []
    assert not link.comm.is_valid  # the other one was freed too
    with pytest.raises(dist.DistBackendError, match="its group is destroyed"):
        call()


def test_communicators_are_ended_in_one_order_on_all_ranks_and_forgotten_while_another_thread_looks():
    made = communicators.Communicators(2, 4, None)

    class Peer(int):
        def __lt__(self, other):  # as they are put in order
            made.forget()
            return False

        __gt__ = __lt__

    made.pairs, made.group = {3: "3", 0: "0", 1: "1"}, "all"
    assert made.links() == ["0", "1", "3", "all"]
    made.pairs = {Peer(3): "3", Peer(0): "0"}
    assert sorted(made.links()) == ["0", "3", "all"]
    assert made.links() == []
