"""Liveness: which processes of the job have ended, which exit, and which are stopped.

For processes of this node the source is ``/proc``. For processes of another node, that node's ranks send the news. If
no rank is left there, a connection shows it: the nodes form a ring, and each rank keeps a TCP connection to a rank of
the next node (more, if that one has more ranks). When a process ends, its kernel resets its connections. If a new
connection is then refused, the process has ended: the host answers, and no process listens. Silence proves nothing,
because the link may be lost; neither does a refusal alone, because a firewall refuses too. An authentic datagram from a
process revokes earlier news of its end.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any

from hpcdist.launch import addresses
from hpcdist.watch.channel import Channel
from hpcdist.watch.endpoint import Endpoint, Process, process_status
from hpcdist.watch.question import Message

NEWS_SECONDS = 0.5  # seconds that the others have to acknowledge news
# the kernel's probes of a silent connection (s, s, number)
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
CONNECT_SECONDS = 1.0  # seconds for an answer to a connection
AT_ONCE = 256  # connections
ENDED, STOPPED = ("", "Z", "X"), ("T", "t")  # states of a process in /proc; "" if it has ended

PROCESS_STATES = {
    **dict.fromkeys(ENDED, "its process has ended"),
    "T": "its process is stopped (SIGSTOP or a debugger)",
    "t": "its process is stopped by a debugger",
    "D": "its process is in uninterruptible sleep (I/O)",
}
NO_ANSWER = "it does not answer: stopped, gone, or busy in native code that holds Python's interpreter lock"
NOBODY_ANSWERS = "nobody off this node answers: is UDP blocked between the nodes?"

Address = tuple[str, int]


def next_node(rank: int, endpoints: Mapping[int, Endpoint], ended: Iterable[int] = ()) -> list[int]:
    """Return the ranks of the next node to which a rank keeps a connection, without those that have ended."""
    gone = set(ended)
    nodes: dict[tuple[str, str], list[int]] = {}
    for each in sorted(endpoints):
        if each not in gone:
            nodes.setdefault(endpoints[each].node, []).append(each)
    ring = list(nodes.values())
    own = next((index for index, node in enumerate(ring) if rank in node), None)
    if own is None or len(ring) < 2:
        return []
    peers = ring[own]
    return [each for i, each in enumerate(ring[(own + 1) % len(ring)]) if i % len(peers) == peers.index(rank)]


class Connection:
    """A connection to a process of another node, at one of its addresses, which shows when it ends."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._was_reset = False
        self._socket = self._connect()

    def _connect(self) -> socket.socket:
        made = socket.socket(addresses.family_of(self._target[0]), socket.SOCK_STREAM)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            made.setsockopt(socket.IPPROTO_TCP, option, value)
        made.connect_ex(self._target)
        return made

    def is_proof(self) -> bool:
        """Tell whether the process has certainly ended: its connection was reset, and it refuses another one."""
        try:
            was_closed = self._socket.recv(1) == b""
        except BlockingIOError:
            with suppress(OSError):  # not connected yet
                self._socket.getpeername()
                self._was_reset = False
            return False
        except ConnectionRefusedError:
            if self._was_reset:
                return True
            was_closed = False
        except OSError as error:  # unreachable, or silence: it proves nothing
            was_closed = isinstance(error, ConnectionResetError)
        self._was_reset = self._was_reset or was_closed
        self.close()
        with suppress(OSError):  # no descriptor is left; tried again later
            self._socket = self._connect()
        return False

    def close(self) -> None:
        self._socket.close()


class Liveness:
    """This rank's knowledge of the processes of the job."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.ended: set[Process] = set()  # processes of other nodes that are known to have ended
        self.left: set[Process] = set()  # processes that make no more calls, and wait for the others at the exit
        self._found: set[Process] = set()  # those of ``ended`` that this rank's connections have proved
        self._sent: set[Process] = set()  # the news that was sent to the other ranks
        self._connections: dict[Endpoint, list[Connection]] = {}
        self._ring: tuple[Any, list[int]] = (None, [])  # the inputs of ``next_node``, and its result
        channel.note_life = self.note_life
        channel.register("ended", self._note_ended)
        channel.register("here", self._note_here)
        channel.register("all leave", self._note_all_left)

    # -- what is known ---------------------------------------------------------------------------------

    def has_ended(self, endpoint: Endpoint) -> bool:
        if not self.channel.sees(endpoint):
            return endpoint.process in self.ended
        return self.state(endpoint) in ENDED

    def state(self, endpoint: Endpoint) -> str:
        """Return the state of a process of this node, as ``process_status``; a later one with its id does not count."""
        state, birth = process_status(endpoint.pid)
        return "" if birth and endpoint.birth and birth != endpoint.birth else state

    def gone(self) -> set[int]:
        """Return the ranks that are known to have ended, and the numbers of such that were left out.

        While no rank of another node is known to have ended, only the processes of this node are checked.
        """
        near = {**self.channel.node_peers, **self.channel.left_out}
        found = {number for number, each in near.items() if self.has_ended(each)}
        return found.union(self.channel.endpoints.of_processes(self.ended) - near.keys() if self.ended else ())

    def living(self) -> list[int]:
        """Return the ranks that are not known to have ended, in order."""
        gone = self.gone()
        return [rank for rank in self.channel.endpoints if rank not in gone]

    def stopped(self) -> list[Endpoint]:
        """Return the stopped processes of the job on this node, including those of excluded ranks."""
        return [each for each in self.channel.node_peers.values() if self.state(each) in STOPPED]

    def kill_stopped(self) -> None:
        """Kill the stopped processes of the job on this node."""
        for each in self.stopped():
            with suppress(OSError):
                os.kill(each.pid, signal.SIGKILL)

    def halted(self) -> list[tuple[int, str]]:
        """Return the ranks of this node whose processes do not run, with their states, for ranks of other nodes."""
        states = [(rank, self.state(each)) for rank, each in self.channel.node_peers.items()]
        return [(rank, state) for rank, state in states if state in PROCESS_STATES]

    def judge(self, rank: int, state: str = "?") -> str:
        """Return as text why a rank does not answer, as far as this rank can know.

        ``state`` is the state of its process as seen by ranks of its node, if that is another node.
        """
        if (endpoint := self.channel.endpoints.get(rank)) is None:
            return NO_ANSWER
        if self.channel.sees(endpoint):
            state = self.state(endpoint)
            return PROCESS_STATES.get(state, NO_ANSWER) + (f" (process {endpoint.pid})" if state else "")
        state = "" if self.has_ended(endpoint) else state
        if state not in PROCESS_STATES and not self.channel.has_answer:
            return NOBODY_ANSWERS
        return f"{PROCESS_STATES.get(state, NO_ANSWER)} ({endpoint})"

    # -- what is found out and sent --------------------------------------------------------------------

    def _note_all_left(self, message: Message) -> Message:
        self.left.update(each.process for each in self.channel.endpoints.values())
        return {}

    def note_life(self, process: Process) -> None:
        """Record that an authentic datagram has come from a process: it has not ended."""
        if process in self.ended:
            for known in (self.ended, self._found, self._sent):
                known.discard(process)

    def _note_here(self, message: Message) -> Message:
        """Record the life of the asking process, if others relay its question."""
        if (process := message.get("process")) is not None:
            self.note_life((process[0], process[1]))
        return {}

    def _note_ended(self, message: Message) -> Message:
        """Record another rank's news; a process that is itself reported as ended sends all others a message."""
        ended = {(machine, pid) for machine, pid in message["processes"]}
        if self.channel.own.process in ended:
            self.channel.send(self.channel.endpoints, "here", process=self.channel.own.process)
        self.ended |= ended - {self.channel.own.process}
        return {}

    def look(self) -> None:
        """Check the connections to the next node, and send the other ranks the news of ended processes.

        News of this node is sent by its lowest running rank, if there are other nodes; news of another node by the rank
        that found it.
        """
        channel, gone, peers = self.channel, self.gone(), self.channel.node_peers
        self._look_at_next_node(gone)
        news = self._found - self._sent
        if channel.endpoints.keys() - peers.keys():
            near = {each.process for number, each in peers.items() if number in gone} - self._sent
            if (
                near
                and next(each.pid for each in peers.values() if self.state(each) not in (*ENDED, *STOPPED))
                == channel.own.pid
            ):
                news |= near
        if news:
            self._sent |= news
            # a process that gets it is alive, and answers
            accused = channel.endpoints.of_processes(news)
            channel.send([*self.living(), *accused], "ended", processes=sorted(news))

    def _look_at_next_node(self, gone: set[int]) -> None:
        channel, made_from = self.channel, (self.channel.rank, self.channel.numbering, *sorted(gone))
        if made_from != self._ring[0]:  # computed again only after a change: it takes 3 ms for 10,000 ranks
            self._ring = made_from, next_node(channel.rank, channel.endpoints, gone)
        endpoints = channel.endpoints  # another thread may renumber the ranks meanwhile
        watched = [endpoints[rank] for rank in self._ring[1] if rank in endpoints]
        self._keep(watched)
        for endpoint in watched:
            if endpoint not in self._connections:
                with suppress(OSError):  # no descriptor is left; tried again later
                    targets = channel.stream_targets(endpoint)
                    self._connections[endpoint] = [Connection(target) for target in targets]
            proofs = [each.is_proof() for each in self._connections.get(endpoint, ())]  # each is checked
            if any(proofs):
                self.ended.add(endpoint.process)
                self._found.add(endpoint.process)
        if not channel.has_answer:  # a node with more ranks than the next one has some that watch none
            elsewhere = (rank for rank in endpoints if rank not in channel.node_peers)
            channel.send(self._ring[1] or islice(elsewhere, 1), "here")

    def _keep(self, endpoints: list[Endpoint]) -> None:
        """Close the connections to all processes except these."""
        for each in self._connections.keys() - set(endpoints):
            for connection in self._connections.pop(each):
                connection.close()

    def close(self) -> None:
        self._keep([])


def answers(targets: Iterable[Address], seconds: float = CONNECT_SECONDS) -> dict[Address, int]:
    """Connect to addresses and return the error number of each: 0 for a connection, EINPROGRESS for silence."""

    def connect(target: Address) -> int:
        try:
            socket.create_connection(target, seconds).close()
        except OSError as error:
            return error.errno or errno.EINPROGRESS
        return 0

    several = list(dict.fromkeys(targets))
    with ThreadPoolExecutor(AT_ONCE) as pool:  # each takes a descriptor
        return dict(zip(several, pool.map(connect, several), strict=True))


class ProofOfDeath:
    """Distinguishes a process that has ended from one that is unreachable, also if it is not in the world any more.

    It connects once to the port of each rank of the world (``Channel.listener``), to find an address at which each can
    be reached. A refusal at an address that was reachable proves that the process has ended.
    """

    def __init__(self, channel: Channel) -> None:
        targets = [channel.stream_targets(each) for _, each in sorted(channel.endpoints.items())]
        found = answers(target for several in targets for target in several)
        self._reached = [[each for each in several if found.get(each) == 0] for several in targets]

    def ended(self, numbers: Iterable[int]) -> set[int]:
        """Return the processes that have certainly ended, by the ranks that they had."""
        asked = {target: number for number in numbers for target in self._reached[number]}
        return {asked[target] for target, error in answers(asked).items() if error == errno.ECONNREFUSED}
