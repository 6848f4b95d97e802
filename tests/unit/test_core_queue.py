"""Queue of asynchronous calls: order, waits, errors, and its end."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from hpcdist.core.errors import DistBackendError
from hpcdist.core.work import AllWork, DoneWork, Queue


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


def test_a_wait_with_a_limit_ends_and_the_call_goes_on(queue):
    gate = Gate()
    work = queue.put(gate, [])
    with pytest.raises(DistBackendError, match="wait timeout after 20ms"):
        work.wait(timedelta(milliseconds=20))
    assert not work.is_completed()
    gate.is_open.set()
    assert work.wait()


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


def test_what_is_given_up_raises_and_nothing_follows(queue):
    gate = Gate()
    running, waiting = queue.put(gate, []), queue.put(lambda: None, [])
    assert gate.has_begun.wait(20)
    assert queue.pending() == [running, waiting]
    queue.fail(DistBackendError("a rank died"))
    for work in (running, waiting):
        with pytest.raises(DistBackendError, match="a rank died"):
            work.wait()
    for call in (lambda: queue.put(lambda: None, []), queue.drain):
        with pytest.raises(DistBackendError, match="can no longer be used: a rank died"):
            call()
    gate.is_open.set()


def test_close_carries_out_what_is_queued():
    queue, seen = Queue("test"), []
    for number in range(50):
        queue.put(lambda number=number: seen.append(number), [])
    queue.close()
    assert seen == list(range(50))


def test_the_callers_modes_of_autograd_hold_in_the_call(queue):
    seen = []
    with torch.inference_mode():
        queue.put(lambda: seen.append(torch.is_inference_mode_enabled()), []).wait()
    with torch.no_grad():
        queue.put(lambda: seen.append(torch.is_grad_enabled()), []).wait()
    queue.put(lambda: seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled())), []).wait()
    assert seen == [True, False, (False, True)]


def test_futures_and_several_works_as_one(queue):
    tensor = torch.zeros(1)
    works = [queue.put(lambda: tensor.add_(1), [tensor]) for _ in range(3)]
    assert works[0].get_future().wait() == [tensor]
    both = AllWork(works, [tensor])
    assert both.wait()
    assert both.result() == [tensor]
    assert tensor.item() == 3
    assert DoneWork([tensor]).get_future().done()
