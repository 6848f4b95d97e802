"""Proof of death: tells a process that has ended from one that cannot be reached.

Each process of a job listens on a TCP port, and connects to all others' once, to learn an address at which each of them
is reached. As long as a process lives, also stopped or busy, its kernel accepts connections for it; once it has ended,
the kernel refuses them. If the machine is off or cut off, nothing comes back. So a refusal where there was a connection
before proves that the process has ended, and silence proves nothing.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from hpcdist.launch import addresses
from hpcdist.watch.channel import machine

SECONDS = 1.0  # for an answer
AT_ONCE = 256  # connections

Address = tuple[str, int]


def answers(targets: Iterable[Address], seconds: float = SECONDS) -> dict[Address, int]:
    """Connect to addresses and return the error number of each that answers in time, 0 for a connection."""
    several = list(dict.fromkeys(targets))
    found: dict[Address, int] = {}
    for first in range(0, len(several), AT_ONCE):
        found |= answers_at_once(several[first : first + AT_ONCE], seconds)
    return found


def answers_at_once(targets: Iterable[Address], seconds: float) -> dict[Address, int]:
    """Return what ``answers`` does, with a socket for each address at the same time."""
    found = {}
    begun = {}
    poll = select.poll()
    with ExitStack() as sockets:
        for target in targets:
            connection = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            connection.setblocking(False)
            number = connection.connect_ex(target)
            if number == errno.EINPROGRESS:
                begun[connection.fileno()] = connection, target
                poll.register(connection, select.POLLOUT)
            else:
                found[target] = number
        deadline = time.monotonic() + seconds
        while begun and (left := deadline - time.monotonic()) > 0:
            for each, _ in poll.poll(left * 1000):
                connection, target = begun.pop(each)
                poll.unregister(each)
                found[target] = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return found


class ProofOfDeath:
    """Where the processes of a job are reached; every process makes one.

    Args:
        all_gather: returns the objects of all processes of the job, in order.
    """

    def __init__(self, all_gather: Callable[[Any], list[Any]]) -> None:
        self._listener = socket.create_server((addresses.ALL_INTERFACES, 0), backlog=socket.SOMAXCONN)
        _proofs.add(self)
        own = addresses.own()
        places = []
        for other, theirs, port in all_gather((machine(), own, self._listener.getsockname()[1])):
            # an address that this machine has too, such as a container network's, reaches this machine
            shared = [addresses.LOOPBACK] if other == machine() else [each for each in theirs if each not in own]
            places.append([(each, port) for each in shared])
        found = answers(target for targets in places for target in targets)
        self._reached = [[each for each in targets if found.get(each) == 0] for targets in places]

    def ended(self, numbers: Iterable[int]) -> set[int]:
        """Return those of some processes, by their numbers, that have surely ended."""
        asked = {target: number for number in numbers for target in self._reached[number]}
        return {asked[target] for target, error in answers(asked).items() if error == errno.ECONNREFUSED}

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


_proofs: weakref.WeakSet[ProofOfDeath] = weakref.WeakSet()


def leave_to_parent() -> None:
    """Close, in a forked child, what its parent listens on: while the child had it, the parent would count as alive."""
    for proof in list(_proofs):
        proof.close()


os.register_at_fork(after_in_child=leave_to_parent)
