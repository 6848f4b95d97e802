"""What a rank knows of the others' processes, for many ranks: a look each second must not look at all of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from hpcdist.core.journal import Journal
from hpcdist.core.waiting import wait_readable, wait_until
from hpcdist.core.world import WORLD
from hpcdist.watch.call_exchange import is_destroyed_unused
from hpcdist.watch.channel import Channel
from hpcdist.watch.endpoint import Endpoint, process_status
from hpcdist.watch.exit import has_unsent_bytes, needs
from hpcdist.watch.liveness import NO_ANSWER, NOBODY_ANSWERS, PROCESS_STATES, Liveness
from hpcdist.watch.report import judge_of

RANKS, EACH = 2_000, 8  # ranks of a job, and on one node
LISTENS = """
import socket
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
input()
"""


@pytest.fixture
def liveness() -> Iterator[Liveness]:
    """What rank 0 knows, whose node peers are this process and its parent."""
    channel = Channel(0)
    own = channel.own
    parent = own._replace(pid=os.getppid(), birth=process_status(os.getppid())[1])
    endpoints = [
        (own if rank == 0 else parent)
        if rank < EACH
        else own._replace(machine=f"machine {rank // EACH}", addresses=("192.0.2.1",), port=9, pid=rank)
        for rank in range(RANKS)
    ]
    channel.learn(range(RANKS), endpoints)
    made = Liveness(channel)
    yield made
    made.close()
    channel.close()


def test_a_look_asks_only_about_the_processes_of_this_node(liveness: Liveness, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Endpoint] = []
    real = Liveness.has_ended
    monkeypatch.setattr(Liveness, "has_ended", lambda self, each: asked.append(each) or real(self, each))
    liveness.look()
    assert liveness.gone() == set()
    assert liveness.living() == list(range(RANKS))
    assert set(asked) == set(liveness.channel.node_peers.values())
    assert len(asked) == 3 * EACH


def test_an_end_elsewhere_is_known_once_it_is_told_and_an_answer_takes_it_back(liveness: Liveness) -> None:
    far = liveness.channel.endpoints[RANKS - 1]
    liveness._note_ended({"processes": [list(far.process)]})
    assert liveness.gone() == {RANKS - 1}
    liveness.channel._note_answer(far)
    assert liveness.gone() == set()
    assert liveness.living() == list(range(RANKS))
    liveness._note_ended({"processes": [list(far.process)]})
    liveness.channel.renumber(list(range(RANKS - 1)))
    assert liveness.gone() == {-2}  # also one that was left out
    assert liveness.living() == list(range(RANKS - 1))
    assert list(liveness.channel.node_peers) == list(range(EACH))


def test_a_silent_rank_elsewhere_is_not_accused_before_anything_came_from_there(liveness: Liveness) -> None:
    channel = liveness.channel
    assert liveness.judge(RANKS - 1) == NOBODY_ANSWERS
    channel._note_answer(channel.endpoints[1])  # a rank of this node says nothing about the others
    assert liveness.judge(RANKS - 1) == NOBODY_ANSWERS
    channel._note_answer(channel.endpoints[EACH])
    assert liveness.judge(RANKS - 1).startswith(NO_ANSWER)
    assert f"(process {RANKS - 1} on " in liveness.judge(RANKS - 1)
    assert liveness.judge(RANKS - 1, "T").startswith(PROCESS_STATES["T"])


@pytest.mark.parametrize("near", [1, 2])
def test_a_question_from_elsewhere_is_no_answer(near: int) -> None:
    """If datagrams pass in one direction only, this rank must not take the silence of the others for their end."""
    far, own = Channel(near), Channel(near - 1)
    ranks = {0: own.own._replace(pid=os.getppid()), own.rank: own.own, far.rank: far.own._replace(node_key="another")}
    for each in (own, far):
        each.learn(ranks, ranks.values())
    liveness = Liveness(own)
    far.send([own.rank], "here")
    assert wait_readable([own.socket], 5)
    own.answer()
    assert not own.has_answer
    far.register("here", lambda message: {})
    liveness.look()  # also of a rank that keeps no connection to the other node
    assert wait_readable([far.socket], 5)
    far.answer()
    assert wait_until(lambda: own.answer() or own.has_answer, 5)
    for each in (liveness, own, far):
        each.close()


def test_what_ranks_of_a_node_see_of_it_is_believed_of_that_node_only(liveness: Liveness) -> None:
    said = {"halted": [[RANKS - 1, "T"], [EACH, "T"], [RANKS, "T"]]}
    judge = judge_of(liveness, {RANKS - 2: said})
    assert judge(RANKS - 1).startswith(PROCESS_STATES["T"])
    assert judge(EACH) == NOBODY_ANSWERS
    assert judge(RANKS) == NO_ANSWER


def test_a_zombie_and_a_later_process_with_its_id_have_ended(liveness: Liveness) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        birth = process_status(process.pid)[1]
        endpoint = liveness.channel.own._replace(pid=process.pid, birth=birth)
        assert not liveness.has_ended(endpoint)
        assert liveness.has_ended(endpoint._replace(birth="1"))
        process.kill()
        assert wait_until(lambda: process_status(process.pid)[0] == "Z", 10)
        os.kill(process.pid, 0)  # the kernel still has it
        assert liveness.has_ended(endpoint)


@pytest.fixture
def pair() -> Iterator[tuple[Liveness, Liveness]]:
    """Ranks 0 and 1 on two nodes, in one process."""
    channels = [Channel(0), Channel(1)]
    channels[1].own = channels[1].own._replace(machine="another", addresses=("127.0.0.1",), pid=1)
    for channel in channels:
        channel.learn([0, 1], [each.own._replace(addresses=("127.0.0.1",)) for each in channels])
    yield Liveness(channels[0]), Liveness(channels[1])
    for channel in channels:
        channel.close()


def looks(liveness: Liveness, times: int) -> None:
    """Look at the next node some times."""
    for _ in range(times):
        liveness._look_at_next_node(liveness.gone())
        time.sleep(0.02)


def test_a_reset_and_a_refusal_prove_a_death_and_neither_does_by_itself(pair: tuple[Liveness, Liveness]) -> None:
    watching, _ = pair
    channel = watching.channel
    with subprocess.Popen([sys.executable, "-c", LISTENS], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            refusing = channel.endpoints[1]._replace(stream_port=unused.getsockname()[1])
            channel.learn([1], [refusing])
            looks(watching, 4)
            assert not watching.ended  # it has refused each time, as a firewall does
        channel.learn([1], [refusing._replace(stream_port=port)])
        watching.close()
        looks(watching, 2)
        process.send_signal(signal.SIGSTOP)
        looks(watching, 3)
        assert not watching.ended
        process.kill()
        assert wait_until(lambda: looks(watching, 1) or watching.ended, 10)
    assert watching.ended == {channel.endpoints[1].process}
    watching.close()


def test_a_process_that_is_said_to_have_ended_objects(pair: tuple[Liveness, Liveness]) -> None:
    accusing, accused = pair
    accusing.ended.add(accused.channel.own.process)
    accusing._found.add(accused.channel.own.process)
    answering = threading.Thread(target=lambda: [accused.channel.answer() or time.sleep(0.01) for _ in range(100)])
    answering.start()
    accusing.look()
    assert wait_until(lambda: accusing.channel.answer() or not accusing.ended, 10)
    answering.join()
    assert not accusing._sent
    accusing.close()


def test_ranks_that_shrink_a_group_or_destroy_what_is_destroyed_here_wait_for_nobody_who_leaves() -> None:
    call = {"group": "unknown here", "name": "all_reduce", "number": 5, "message": False, "peer": None}
    assert needs(call, 3)
    assert not needs({**call, "name": "shrink_group"}, 3)
    assert not needs({**call, "name": "destroy_process_group"}, 3)  # a rank that is late in it has all that it needs


def test_a_rank_that_is_late_in_what_this_one_has_done_does_not_wait_for_it() -> None:
    """Of collectives that came before the end of their group, and of messages that may still be under way."""
    journal = Journal("destroyed")
    journal.message("isend", None, None, 2)
    for name in ("broadcast", "destroy_process_group"):
        journal.collective(name)
    call = {"group": "destroyed", "name": "broadcast", "number": 1, "message": False, "peer": None}
    assert not needs(call, 3)
    assert needs({**call, "number": 2}, 3)  # this rank's second call was the end
    message = {**call, "name": "irecv", "message": True, "peer": 3}
    assert needs(message, 3)
    assert not needs(message, 3, may_arrive=True)
    assert needs({**message, "group": "of no messages"}, 3, may_arrive=True)
    making = {**message, "name": "create_group", "peer": None}
    assert needs(making, 3)
    journal.message("create_group", None, None, None)
    assert not needs(making, 3)
    Journal("destroyed").collective("destroy_process_group")  # of the next default group: names come again
    assert needs(call, 3)


def test_what_the_kernel_has_not_brought_to_the_other_side_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            assert wait_until(lambda: not has_unsent_bytes(), 5)
            sender.setblocking(False)
            sent = 0
            while sent < 64 << 20:
                try:
                    sent += sender.send(bytes(1 << 16))
                except BlockingIOError:
                    break
            assert has_unsent_bytes()
            sender.shutdown(socket.SHUT_WR)
            while receiver.recv(1 << 16):
                pass
            assert wait_until(lambda: not has_unsent_bytes(), 5)


def test_a_group_with_a_collective_or_a_message_does_not_count_as_destroyed_without_one() -> None:
    def are_unused() -> list[bool]:
        return [is_destroyed_unused({"group": name, "message": each}) for name in journals for each in (False, True)]

    journals = {each: Journal(each) for each in ("of a message", "of a collective")}
    journals["of a message"].message("isend", None, None, 2)
    journals["of a collective"].collective("barrier")
    assert are_unused() == [False] * 4
    for each in journals.values():
        each.collective("destroy_process_group")
    assert are_unused() == [True, False, False, True]
    with patch.dict(WORLD.groups, {"of a message'": SimpleNamespace(group_name="of a message")}):  # a later one
        assert are_unused() == [False, False, False, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has mounts of its own")
def test_a_process_that_the_kernel_hides_is_not_taken_for_dead() -> None:
    """As where there is no /proc, or it hides processes of this user (``hidepid``, in containers of their own)."""
    program = (
        "import os, subprocess, sys\n"
        "from hpcdist.watch.endpoint import process_status\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "assert not os.path.exists('/proc/self')\n"
        "print(*(process_status(each)[0] for each in (os.getpid(), child.pid, 1)))\n"
        "child.kill()\n"
        "child.wait()\n"
        "print(process_status(child.pid)[0] or 'gone')\n"
    )
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    done = subprocess.run([*hide, sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "? ? ?\ngone\n", done.stderr
