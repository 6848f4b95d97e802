"""Queue of asynchronous calls: order, waits, errors, and its end."""

import random
import threading
import time
import weakref
from collections import deque
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from hpcdist.backends.gloo import GlooBackend
from hpcdist.core import backend as backend_module
from hpcdist.core import queue as queue_module
from hpcdist.core import work as work_module
from hpcdist.core.backend import Bootstrap
from hpcdist.core.call import Call
from hpcdist.core.errors import CallsDifferError, DistBackendError
from hpcdist.core.journal import Journal
from hpcdist.core.queue import Queue, in_modes_of_caller
from hpcdist.core.table import ALL_REDUCE
from hpcdist.core.waiting import wait_until
from hpcdist.core.work import AllWork, DoneWork, Work


@pytest.fixture
def queue():
    made = Queue("test")
    yield made
    made.close()


class Gate:
    """A call that blocks until it is let go."""

    def __init__(self):
        self.is_open, self.has_begun = threading.Event(), threading.Event()

    def __call__(self):
        self.has_begun.set()
        assert self.is_open.wait(20)


def fail():
    raise DistBackendError("a rank died")


def test_calls_run_in_the_order_in_which_they_were_made(queue):
    seen = []
    works = [queue.put(lambda number=number: seen.append(number), []) for number in range(200)]
    for work in reversed(works):
        assert work.wait()
    assert seen == list(range(200))
    assert all(work.is_completed() and work.is_success() for work in works)


def test_drain_waits_for_everything_that_was_made_before(queue):
    gate, seen = Gate(), []
    queue.put(gate, [])
    queue.put(lambda: seen.append(1), [])
    threading.Timer(0.05, gate.is_open.set).start()
    queue.drain()
    assert seen == [1]
    queue.drain()  # nothing is queued


@pytest.mark.parametrize("error", [CallsDifferError, ZeroDivisionError, None])
def test_once_ranks_differ_in_a_call_none_is_made_until_somebody_has_seen_that(error, queue):
    gate, seen = Gate(), []

    def first():
        gate()
        if error is not None:
            raise error("first")

    works = [queue.put(first, [])]
    queue.hasten()
    assert gate.has_begun.wait(20)  # it is under way, as a large one is, when the others are made
    works += [queue.put(lambda number=number: seen.append(number), []) for number in range(2)]
    gate.is_open.set()
    assert wait_until(lambda: all(work.is_completed() for work in works), 20)
    works.append(queue.put(lambda: seen.append(2), []))
    for work in works if error is CallsDifferError else works[:1] if error else works[-1:]:
        with pytest.raises(error, match="first") if error else nullcontext():
            work.wait()
    queue.drain()
    assert seen == ([] if error is CallsDifferError else [0, 1, 2])


def test_a_call_that_blocks_raises_the_difference_that_nobody_has_seen(queue):
    def differ():
        raise CallsDifferError("first")

    queue.put(differ, [])
    with pytest.raises(CallsDifferError, match="first"):
        queue.drain()
    queue.drain()


@pytest.mark.parametrize("limit", [timedelta(milliseconds=20), timedelta(milliseconds=-1), timedelta(seconds=-1), 0.02])
def test_a_wait_with_a_limit_ends_and_the_call_goes_on(queue, limit):
    gate = Gate()
    work = queue.put(gate, [])
    with pytest.raises(DistBackendError, match="wait timeout after 20ms" if limit == 0.02 else "wait timeout after"):
        work.wait(limit)
    with pytest.raises(TypeError, match="timeout is 3 of type int; expected a timedelta"):
        work.wait(3)
    assert not work.is_completed()
    gate.is_open.set()
    assert work.wait(float("inf"))
    assert work.wait(limit)  # it has ended


def test_an_error_is_raised_by_its_own_wait_and_no_other(queue):
    def fail():
        raise ZeroDivisionError("mine")

    bad, good = queue.put(fail, []), queue.put(lambda: None, [])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine"):
            bad.wait()
    assert isinstance(bad.exception(), ZeroDivisionError)
    assert good.wait()


def test_a_call_made_on_the_worker_follows_at_once(queue):
    seen = []

    def first():
        queue.put(lambda: seen.append("inner"), []).wait()
        seen.append("outer")

    work = queue.put(first, [])
    queue.put(lambda: seen.append("next"), []).wait()
    assert work.wait()
    assert seen == ["inner", "outer", "next"]


@pytest.mark.parametrize("carrier", ["worker", "waiting thread"])
def test_a_call_of_a_callback_is_seen_by_the_watchdog(queue, carrier):
    """As DDP's PowerSGD hook begins calls: in a future's callback, on the thread that carries calls out."""
    journal, seen = Journal("g"), []

    def inner():
        running = queue.running
        seen.append(running._call if running is not None else journal.blocked()[-1].call)

    outer, record = journal.collective("outer"), journal.collective("inner")
    work = queue.put(lambda: queue.put(inner, [], record=record), [], carrier == "worker", outer)
    if carrier == "worker":
        work.get_future().wait()
    else:
        assert work.wait()
    assert seen == [record]
    assert wait_until(lambda: queue.running is None, 20)  # a future ends a moment before its call
    assert not journal.blocked()


@pytest.mark.parametrize("is_large", [False, True])
def test_what_is_given_up_raises_and_is_never_carried_out_and_nothing_follows(is_large, queue):
    gate, seen, error = Gate(), [], DistBackendError("a rank died")
    running = queue.put(gate, [], is_large)
    waiting = queue.put(lambda: seen.append(1), [], is_large)
    assert gate.has_begun.wait(20)
    assert queue.pending() == [running, waiting]
    queue.fail(error)
    for work in (running, waiting):
        with pytest.raises(DistBackendError, match="a rank died"):
            work.wait()
    for call in (lambda: queue.put(lambda: None, []), queue.drain):
        with pytest.raises(DistBackendError, match="can no longer be used: a rank died"):
            call()
    gate.is_open.set()
    assert wait_until(lambda: queue.running is None and not queue._calls, 10)
    assert not seen
    assert running.exception() is error  # though it has ended


def test_the_callers_modes_of_autograd_hold_in_the_call(queue):
    seen = []

    def look():
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    def put():
        return queue.put(in_modes_of_caller(look), [])

    with torch.inference_mode():
        put().wait()
    with torch.no_grad():
        put().wait()
    outside = put()
    with torch.inference_mode():
        outside.wait()
        inside = put()
    inside.wait()
    assert seen == [(True, False), (False, False), (False, True), (True, False)]


def test_futures_and_several_works_as_one(queue):
    tensor = torch.zeros(1)
    works = [queue.put(lambda: tensor.add_(1), [tensor]) for _ in range(3)]
    assert works[0].get_future().wait() == [tensor]
    both = AllWork(works, [tensor])
    assert both.wait()
    assert both.result() == [tensor]
    assert tensor.item() == 3
    assert both.get_future().wait() == [tensor]
    assert DoneWork([tensor]).get_future().done()


def test_several_works_of_which_one_failed(queue):
    first, second = queue.put(lambda: None, []), queue.put(fail, [])
    both = AllWork([first, second], [])
    queue.drain()
    assert isinstance(both.exception(), DistBackendError)  # though nobody has asked whether it has ended
    assert not both.is_success()
    with pytest.raises(RuntimeError, match="a rank died"):
        both.get_future().wait()


def test_all_parts_end_before_the_error_of_one_is_raised(queue):
    written = []
    works = [queue.put(fail, []), queue.put(lambda: written.append(1), []), queue.put(fail, [])]
    with pytest.raises(DistBackendError, match="a rank died"):
        AllWork(works, []).wait()
    assert written == [1]
    assert all(work._done for work in works)


def test_no_work_at_all_has_ended():
    nothing = AllWork([], [])
    assert nothing.get_future().done()
    assert nothing.wait()
    assert nothing.is_success()


class Part(Work):
    """Keeps the limits of its waits, each of which takes 3 s by the clock of the test."""

    def __init__(self, clock):
        super().__init__([])
        self.clock, self.limits = clock, []

    def _block(self, seconds):
        self.limits.append(seconds)
        self.clock[0] += 3
        return True


def test_the_limit_of_several_works_is_one_for_all_in_each_wait(monkeypatch):
    clock = [100.0]
    parts = [Part(clock) for _ in range(3)]
    monkeypatch.setattr(work_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    several = AllWork(parts, [])
    assert several.wait(timedelta(seconds=5))
    assert [each.limits[0] for each in parts[:2]] == [5, 2]
    assert 0 < parts[2].limits[0] < 0.1
    for _ in range(2):  # a device's parts order the stream that is current at each
        assert several.wait()
    assert [each.limits[1:] for each in parts] == [[None, None]] * 3
    assert not several.is_completed()


def test_the_longest_limit(queue):
    works = [queue.put(lambda: time.sleep(0.01), [], is_large=True) for _ in range(2)]
    assert AllWork(works, []).wait(timedelta.max)


# -- who carries a call out --------------------------------------------------------------------------------


def test_a_wait_carries_out_small_calls_on_its_own_thread(queue):
    carriers = []
    for _ in range(300):
        queue.put(lambda: carriers.append(threading.get_ident()), []).wait()
    assert carriers.count(threading.get_ident()) > 200  # the others where this thread lost its core after ``put``


@pytest.mark.parametrize("is_large", [False, True])
def test_the_worker_carries_out_what_nobody_waits_for(is_large, queue):
    for _ in range(5):
        gate = Gate()
        work = queue.put(gate, [], is_large)
        assert gate.has_begun.wait(20)
        assert queue.running is work
        gate.is_open.set()
        assert work.wait()
        time.sleep(0.05)  # the worker sleeps again


def test_a_wait_with_a_limit_leaves_the_call_to_the_worker(queue):
    for _ in range(20):
        carriers = []
        assert queue.put(lambda to=carriers: to.append(threading.get_ident()), []).wait(timedelta(seconds=20))
        assert carriers != [threading.get_ident()]


def carried_out_by_this_thread(queue, see, record=None):
    """Have this thread carry a call out; the worker may be faster now and then."""
    for _ in range(1000):
        seen = []
        work = queue.put(lambda to=seen: to.append((queue.running, see())), [], False, record)
        work.wait()
        if seen[0][0] is None:
            return work, seen[0][1]
    raise AssertionError("this thread never carried a call out")


def test_a_call_that_a_waiting_thread_carries_out_is_in_the_foreground(queue):
    journal = Journal("test")
    record = journal.collective("all_reduce")
    work, (pending, blocked) = carried_out_by_this_thread(queue, lambda: (queue.pending(), journal.blocked()), record)
    assert pending == [work]
    assert [(each.call, each.work, each.thread) for each in blocked] == [(record, None, threading.get_ident())]
    assert journal.current is None
    assert queue.pending() == []


def test_an_interrupt_from_the_keyboard_reaches_the_thread_that_waits(queue):
    def interrupt():
        if queue.running is None:
            raise KeyboardInterrupt

    for _ in range(1000):
        first, second = queue.put(interrupt, []), queue.put(lambda: None, [])
        try:
            second.wait()  # it carries the first one out, too
        except KeyboardInterrupt:
            assert isinstance(first.exception(), KeyboardInterrupt)
            assert second.wait()
            return
    raise AssertionError("this thread never carried a call out")


def test_a_callback_may_call_and_wait_for_what_is_queued_behind_its_call(queue):
    seen = []
    first, second = queue.put(lambda: seen.append("first"), []), queue.put(lambda: seen.append("second"), [])

    def follow(_):
        queue.put(lambda: seen.append("inner"), []).wait()
        queue.drain()  # a synchronous call
        second.wait()
        seen.append("callback")

    followed = first.get_future().then(follow)
    followed.wait()
    assert seen in (["first", "inner", "second", "callback"], ["first", "second", "inner", "callback"])


def test_a_callback_may_end_the_queue(queue):
    seen = []
    first = queue.put(lambda: None, [])
    last = [queue.put(lambda: None, []) for _ in range(5)][-1]

    def end(_):
        queue.close()
        seen.append(last.is_completed())  # before the communicator is freed

    first.get_future().then(end).wait()
    assert seen == [True]


def switches(thread):
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


def test_the_worker_sleeps_while_nothing_is_queued(queue):
    for _ in range(100):
        queue.put(lambda: None, []).wait()
    deadline = time.monotonic() + 20
    before = -1
    while before != (before := switches(queue._thread)):
        assert time.monotonic() < deadline, "the worker never sleeps"
        time.sleep(0.3)
    assert queue.put(lambda: None, []).wait()


def test_a_burst_of_small_calls_wakes_the_worker_once(queue):
    time.sleep(0.2)  # it sleeps
    before = switches(queue._thread)
    works = [queue.put(lambda: None, []) for _ in range(5000)]
    works[-1]._block(20)
    assert switches(queue._thread) - before < 500
    assert all(work.is_completed() for work in works)


def test_no_wake_up_is_lost():
    """100,000 calls, waited for in every way by four threads: all of them end, in order."""
    choice = random.Random(1)
    queue, seen, failures = Queue("test"), [], []
    given, wanted = deque(), threading.Semaphore(0)

    def serve():
        while True:
            wanted.acquire()
            work = given.popleft()
            if work is None:
                return
            try:
                assert work.wait()
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    kept = []
    for number in range(100_000):
        work = queue.put(lambda number=number: seen.append(number), [], choice.random() < 0.02)
        chosen = choice.random()
        if chosen < 0.6:
            assert work.wait()
        elif chosen < 0.7:
            given.append(work)
            wanted.release()
        elif chosen < 0.72:
            queue.drain()
            assert work._done
        elif chosen < 0.73:
            assert work.get_future().wait() == []
        elif chosen < 0.74:
            assert work.wait(timedelta(seconds=20))
        elif chosen < 0.745:
            time.sleep(choice.random() * 1e-4)
        elif chosen < 0.9:
            kept.append(work)
        if len(kept) > 50:
            choice.shuffle(kept)
            while kept:
                assert kept.pop().wait()
    queue.close()
    for _ in threads:
        given.append(None)
        wanted.release()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert seen == list(range(100_000))


def test_who_ends_its_turn_wakes_the_worker_that_was_to_have_it(monkeypatch):
    for name in ("SHORTEST_NAP", "LONGEST_NAP"):
        monkeypatch.setattr(queue_module, name, 30.0)
    queue = Queue("test")
    gate, has_run = Gate(), threading.Event()
    mine = queue.put(gate, [])
    thief = threading.Thread(target=mine.wait)
    thief.start()
    assert gate.has_begun.wait(20)
    assert queue.running is None, "the thread that waits carries the call out"
    queue.put(has_run.set, [], is_large=True)
    time.sleep(0.1)  # the worker looks, and naps, because the turn is taken
    gate.is_open.set()
    assert has_run.wait(10)
    thief.join()
    queue.close()


def begun_and_ended(queue, is_large=False):
    work = queue.put(lambda: None, [torch.ones(2)], is_large)
    assert work.wait()
    return weakref.ref(work)


def test_a_small_work_stays_until_the_next_call_and_a_large_one_does_not(monkeypatch):
    for name in ("SHORTEST_NAP", "LONGEST_NAP", "IDLE_NAP"):
        monkeypatch.setattr(queue_module, name, 30.0)
    queue = Queue("test")
    first = begun_and_ended(queue)
    assert first() is not None
    second = begun_and_ended(queue)
    assert first() is None
    queue.drain()
    assert second() is None
    begun_and_ended(queue, is_large=True)
    assert queue._latest is None
    queue.close()


def test_a_small_work_goes_soon_though_no_call_follows(queue):
    work = begun_and_ended(queue)
    assert wait_until(lambda: work() is None, 10)


def test_the_worker_looks_seldom_while_others_carry_all_calls_out():
    queue = Queue("test")
    looks = []

    class CountedAlarm:
        def acquire(self, timeout=-1):
            looks.append(timeout)
            return alarm.acquire(timeout=timeout)

        def release(self):
            alarm.release()

    alarm, queue._alarm = queue._alarm, CountedAlarm()
    queue.put(lambda: None, []).wait()  # wakes the worker, which sleeps on the alarm itself
    end = time.monotonic() + 20  # on a busy machine the worker may come first, and begins with short naps again
    while queue_module.LONGEST_NAP not in looks and time.monotonic() < end:
        queue.put(lambda: None, []).wait()
    assert max(looks) == queue_module.LONGEST_NAP
    queue.close()


class WaitingGroup:
    """A c10d group that waits for its collective to end when nobody has it any more, as gloo does."""

    def __init__(self):
        self.gate = Gate()

    def allreduce(self, *_):
        return SimpleNamespace(wait=self.gate)

    def __del__(self):
        self.gate.is_open.wait(20)


def test_a_c10d_group_is_dropped_without_waiting_for_a_rank_that_does_not_come(monkeypatch):
    monkeypatch.setattr(backend_module, "DROP_SECONDS", 0.1)
    monkeypatch.setattr(GlooBackend, "creator", lambda _: WaitingGroup())
    backend = GlooBackend(Bootstrap(0, 2, timedelta(seconds=30), store=HashStore()))
    gate, tensor = backend.inner.gate, torch.ones(2)
    work = backend.start(Call(ALL_REDUCE, tensor, tensor, torch.distributed.ReduceOp.SUM))
    queue = backend.queue
    queue.hasten()
    assert gate.has_begun.wait(20)
    backend.abort("it was aborted")
    assert queue.running is work
    with pytest.raises(DistBackendError, match="it was aborted"):
        work.wait()
    gate.is_open.set()


def test_close_carries_out_what_is_queued_and_ends_the_thread():
    for count in range(50):
        queue, seen = Queue("closed"), []
        for number in range(count):
            queue.put(lambda number=number, seen=seen: seen.append(number), [])
        queue.close()
        assert seen == list(range(count))
        assert not queue._thread.is_alive()
