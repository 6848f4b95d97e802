"""The progress thread: whose messages it drives, and what a forked child has of it."""

import gc
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("mpi4py.MPI")

from mpi4py import MPI

from hpcdist.backends.mpi.point_to_point import PointToPoint  # needs an MPI library
from hpcdist.backends.mpi.process import ulfm
from hpcdist.backends.mpi.progress import PROGRESS, Progress
from hpcdist.backends.mpi.receives import MatchedReceive
from hpcdist.core.errors import DistBackendError


class Messages:
    """A number of looks for which messages are under way."""

    def __init__(self, looks):
        self.looks, self.seen = looks, 0

    def drive(self):
        self.seen += 1
        self.looks -= 1
        return self.looks > 0


def test_every_source_is_driven_and_a_dropped_one_forgotten():
    progress = Progress()
    first, second, dropped = Messages(3), Messages(2), Messages(9)
    for each in (first, second, dropped):
        progress.follow(each)
    del each, dropped
    gc.collect()
    assert len(progress._sources) == 2  # though the thread has not looked
    assert [progress._look() for _ in range(3)] == [True, True, False]
    assert (first.seen, second.seen) == (3, 3)
    progress.stop()
    assert not progress._look()
    assert first.seen == 3


def test_a_forked_child_makes_no_calls_though_its_parent_was_in_one():
    with PROGRESS._lock:
        child = os.fork()
        if child == 0:
            PROGRESS.stop()
            os._exit(7 if PROGRESS.is_asleep else 0)
    deadline = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_a_receive_counts_as_matched_once_it_has_its_request():
    """The progress thread may match its message while the thread that waits looks, without the lock."""
    receive = MatchedReceive(SimpleNamespace(match=lambda: None), torch.zeros(1), 0, 0)
    receive.status = SimpleNamespace(Get_elements=lambda _: 4)
    seen = []
    receive.begin(SimpleNamespace(Irecv=lambda _: seen.append(receive.is_matched()) or "request"))
    assert (seen, receive.is_matched(), receive.request) == ([False], True, "request")


class FailingSend(Messages):
    """A communicator whose sends fail in their first test, and do not end."""

    comm = property(lambda self: SimpleNamespace(Isend=lambda *_: self))

    def Test(self):
        raise MPI.Exception(MPI.ERR_OTHER)

    def failure(self, call, error):
        return DistBackendError(f"{call} failed")


def test_memory_of_a_send_that_fails_at_once_and_may_still_be_under_way_is_kept(monkeypatch):
    monkeypatch.setattr(ulfm, "UNFINISHED", [])
    tensor, communicator = torch.ones(2), FailingSend(0)
    with pytest.raises(DistBackendError, match="isend failed"):
        PointToPoint(communicator).isend(tensor, 1, 0)
    ((request, memory),) = ulfm.UNFINISHED
    assert request is communicator
    assert memory is tensor
    PROGRESS.leave(communicator)
