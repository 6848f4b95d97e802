"""A hang, and who asks whom about it: mpirun -n 4 python asking_job.py KIND CALL. The ranks in VICTIMS never come.

COUNT names a file that gets a byte a datagram, ASKING_DISK the seconds that a trace takes to be written.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

import hpcdist as dist
from hpcdist.watch import channel, recorder, report
from tests.faults.telling import imitate_nodes, tell

SECONDS = float(os.environ.get("ASKING_TIMEOUT", "2"))
VICTIMS = [int(each) for each in os.environ.get("ASKING_VICTIMS", "1").split(",")]


class Counting(socket.socket):
    """A socket whose datagrams are counted."""

    counter = os.open(os.environ.get("COUNT", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def sendto(self, *arguments: Any) -> int:
        os.write(self.counter, b".")
        return super().sendto(*arguments)


def stop_once_it_has_asked() -> None:
    """Stop this process when it has asked all others and is about to say what they said."""

    def compose(*_: object) -> list[str]:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)  # this thread goes on for a moment, where another one takes the signal
        return []

    setattr(report, "compose", compose)  # noqa: B010  # mypy takes no function's place by assignment


def slow_the_disk_down(seconds: float) -> None:
    """Let each trace take some seconds, as on a disk that others keep busy."""
    trace = recorder.Recorder.trace

    def slow_trace(self: recorder.Recorder) -> dict[str, Any]:
        time.sleep(seconds)
        return trace(self)

    setattr(recorder.Recorder, "trace", slow_trace)  # noqa: B010  # nor a method's


def stay_away(kind: str) -> None:
    tell("fault")
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "leave":
        os._exit(3)
    elif kind == "monitored":  # a call that ends by itself
        with suppress(dist.DistBackendError):
            dist.monitored_barrier(timeout=8)
    time.sleep(60)


def main(kind: str, call: str) -> None:
    dist.barrier()
    is_late = os.environ.get("ASKING_STOPS", str(rank)) != str(rank)  # the one that falls silent asks first
    dist.group.WORLD.timeout = timedelta(seconds=SECONDS * (1 + is_late))
    tell("ready")
    time.sleep(1.1)  # the watchdog looks once a second until then
    if rank in VICTIMS:
        stay_away(kind)
    if str(rank) == os.environ.get("ASKING_BUSY"):
        time.sleep(60)
    if str(rank) == os.environ.get("ASKING_STOPS"):
        stop_once_it_has_asked()
    try:
        if call == "async":
            work = dist.all_reduce(torch.ones(8), async_op=True)
            time.sleep(0.1)  # the worker thread is in it
            work.wait()
        elif call == "limit":
            dist.all_reduce(torch.ones(8), async_op=True).wait(timedelta(seconds=1))
        else:
            dist.all_reduce(torch.ones(8))
    except dist.DistBackendError as error:
        tell("raised", text=str(error))
    signal.pause()


if __name__ == "__main__":
    imitate_nodes()
    setattr(channel.socket, "socket", Counting)  # noqa: B010  # nor a class's
    slow_the_disk_down(float(os.environ.get("ASKING_DISK", "0")))
    dist.init_process_group(timeout=timedelta(seconds=60))  # on a busy machine a rank may be late for the first call
    rank = dist.get_rank()
    main(*sys.argv[1:])
