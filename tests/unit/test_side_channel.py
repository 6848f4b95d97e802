"""What a rank knows of the others' processes, for many ranks: a look each second must not look at all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hpcdist.watch import side_channel
from hpcdist.watch.neighbours import Neighbours
from hpcdist.watch.process_exit import needs
from hpcdist.watch.side_channel import Place, SideChannel

RANKS, EACH = 2_000, 8  # ranks of a job, and on one node


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    """The channel of rank 0, whose node mates are this process and its parent."""
    made = SideChannel()
    own = made.own
    places = [
        own._replace(pid=os.getpid() if rank == 0 else os.getppid())
        if rank < EACH
        else own._replace(machine=f"machine {rank // EACH}", addresses=("192.0.2.1",), port=9, pid=rank)
        for rank in range(RANKS)
    ]
    made.learn(range(RANKS), [tuple(place) for place in places])
    yield made
    made.close()


def test_a_look_asks_only_about_the_processes_of_this_node(
    channel: SideChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Place | None] = []
    real = SideChannel.has_ended
    monkeypatch.setattr(SideChannel, "has_ended", lambda self, place: asked.append(place) or real(self, place))
    neighbours = Neighbours(channel)
    neighbours.look(0, 10.0)
    assert not channel.lacks(range(RANKS))
    assert not channel.any_ended()
    assert channel.to_tell() == ([], [])
    assert len(asked) == 4 * EACH
    neighbours.renumber()


def test_an_end_elsewhere_is_known_once_it_is_told(channel: SideChannel) -> None:
    far = channel.places[RANKS - 1]
    channel.ended.add(far.process)
    assert channel.ended_ranks() == [RANKS - 1]
    assert channel.lacks([3, RANKS - 1])
    assert not channel.lacks([3, 4])
    channel.renumber(list(range(RANKS - 1)))
    assert channel.ended_ranks() == []
    assert channel.any_ended()  # also one that was left out
    assert list(channel.mates) == list(range(EACH))


def test_a_silent_rank_elsewhere_is_not_accused_before_anything_came_from_there(channel: SideChannel) -> None:
    assert channel.judge(RANKS - 1) == side_channel.NOBODY_ANSWERS
    channel._note_heard(1)  # a rank of this node says nothing about the others
    assert channel.judge(RANKS - 1) == side_channel.NOBODY_ANSWERS
    channel._note_heard(EACH)
    assert channel.judge(RANKS - 1).startswith(side_channel.NO_ANSWER)
    assert f"(process {RANKS - 1} on " in channel.judge(RANKS - 1)


def test_ranks_that_shrink_a_group_or_destroy_what_is_destroyed_here_wait_for_nobody_who_leaves() -> None:
    call = {"group": "unknown here", "name": "all_reduce", "number": 5, "message": False, "peer": None}
    assert needs(call, 3)
    assert not needs({**call, "name": "shrink_group"}, 3)
    assert not needs({**call, "name": "destroy_process_group"}, 3)  # a rank that is late in it has all that it needs
