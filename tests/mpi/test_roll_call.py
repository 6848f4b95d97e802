"""Roll call: all that are to come are found to be there, or every rank that has come is told what is wrong."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py")
import hpcdist as dist
from hpcdist.backends.mpi import roll_call
from hpcdist.backends.mpi.communicator import Communicator

LONG, SHORT = 20.0, 0.1  # seconds
COMPLETE = ""
ABSENT, DIFFERENT = "has not come within", "was given another list of handles"


@pytest.fixture
def roll(every, monkeypatch):
    """The roll calls of all ranks; one that waits in vain gives up soon."""
    monkeypatch.setattr(roll_call, "LATEST_SECONDS", SHORT)
    own = every.Dup()
    yield Roll(own)
    own.Free()


class Roll:
    """What this rank finds out, in words."""

    def __init__(self, comm):
        self.comm, self.rank = comm, comm.rank
        self.everyone = list(range(comm.size))
        self.calls = roll_call.RollCall(Communicator(comm))

    def hold(self, uuid, agreed=7, seconds=LONG):
        try:
            self.calls.hold(self.everyone, uuid, agreed, seconds)
        except dist.DistBackendError as error:
            return str(error)
        return COMPLETE


def test_all_come(roll):
    assert [roll.hold(uuid) for uuid in range(20)] == [COMPLETE] * 20


def test_one_that_means_others_is_named_to_all(roll):
    last = roll.everyone[-1]
    found = roll.hold(1, agreed=8 if roll.rank == last else 7)
    assert f"rank {last} when the job began {DIFFERENT}" in found
    assert roll.hold(2) == COMPLETE


def test_one_that_comes_late_is_told_what_the_others_were_told(roll):
    last = roll.everyone[-1]
    if roll.rank != last:
        assert ABSENT in roll.hold(1, seconds=SHORT)
    roll.comm.Barrier()
    if roll.rank == last:
        assert ABSENT in roll.hold(1)
    assert roll.hold(2) == COMPLETE


def test_one_that_has_given_up_does_not_count_as_there(roll):
    if roll.rank != 0:
        assert f"rank 0 when the job began {ABSENT}" in roll.hold(1, seconds=SHORT)
    roll.comm.Barrier()
    if roll.rank == 0:
        assert ABSENT in roll.hold(1, seconds=SHORT)
    roll.comm.Barrier()
    assert roll.hold(2) == COMPLETE


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(roll):
    if roll.rank == 0:
        assert ABSENT in roll.hold(1, seconds=SHORT)
    roll.comm.Barrier()
    if roll.rank != 0:
        assert ABSENT in roll.hold(1, seconds=0.0)
    roll.comm.Barrier()
    assert roll.hold(2) == COMPLETE
