"""What N ranks cost, counted: mpirun --mca pml_monitoring_enable 1 -n N python scaling_job.py. Rank 0 prints JSON.

For each step: the messages and bytes that a rank sends over MPI, the library's own collectives unpacked (Open MPI's
monitoring, MPI chapter 15.3), the datagrams of its watchdog, and its open sockets and threads: rank 0's, and the most
of any rank.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import hpcdist as dist
from hpcdist.launch import environment
from hpcdist.watch import channel

NODE = 8  # ranks of one imitated node
REST_SECONDS = float(os.environ.get("SCALING_REST", "5"))
HANG_SECONDS = float(os.environ.get("SCALING_HANG", "5"))
THREAD_MULTIPLE, PVAR_CLASS_SIZE = 3, 2
VARIABLES = ("pml_monitoring_messages_count", "pml_monitoring_messages_size")


class Datagrams(socket.socket):
    """A socket whose datagrams are counted."""

    sent = 0

    def sendto(self, *arguments: Any) -> int:
        Datagrams.sent += 1
        return super().sendto(*arguments)


class Messages:
    """The messages that this process has sent to each rank, and their bytes, as the MPI library counts them."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        path = next(
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libmpi.so" in line
        )
        self._library = ctypes.CDLL(path)
        self._call("MPI_T_init_thread", THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        self._session = ctypes.c_void_p()
        self._call("MPI_T_pvar_session_create", ctypes.byref(self._session))
        self._comm = ctypes.c_void_p.from_address(MPI._addressof(comm))
        self._handles = [self._handle(name) for name in VARIABLES]

    def _call(self, name: str, *arguments: Any) -> None:
        if (error := getattr(self._library, name)(*arguments)) != 0:
            raise OSError(f"{name} failed with {error}: is it Open MPI, with --mca pml_monitoring_enable 1?")

    def _handle(self, name: str) -> tuple[ctypes.c_void_p, Any]:
        index, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        self._call("MPI_T_pvar_get_index", name.encode(), PVAR_CLASS_SIZE, ctypes.byref(index))
        self._call(
            "MPI_T_pvar_handle_alloc",
            *(self._session, index, ctypes.byref(self._comm), ctypes.byref(handle), ctypes.byref(count)),
        )
        self._call("MPI_T_pvar_start", self._session, handle)
        return handle, (ctypes.c_size_t * count.value)()

    def sent(self) -> tuple[int, int]:
        """Return how many messages this process has sent, and how many bytes."""
        for handle, values in self._handles:
            self._call("MPI_T_pvar_read", self._session, handle, values)
        return sum(self._handles[0][1]), sum(self._handles[1][1])


def open_sockets() -> int:
    """Return how many sockets this process has open."""
    folder = Path("/proc/self/fd")
    return sum(os.readlink(each).startswith("socket:") for each in folder.iterdir() if os.path.lexists(each))


def own_kilobytes() -> int:
    """Return the memory that this process shares with no other, in kB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


def state() -> list[int]:
    """Return what is counted, up to now."""
    sent, size = messages.sent()
    return [sent, size, Datagrams.sent, open_sockets(), threading.active_count(), own_kilobytes()]


def count(step: str, call: Callable[[], object]) -> None:
    """Count what a step costs each rank."""
    before, start = state(), time.monotonic()
    call()
    seconds, after = time.monotonic() - start, state()
    counts = [now - then for now, then in zip(after[:3], before[:3], strict=True)] + after[3:5] + [after[5] - before[5]]
    counted.append((step, seconds, counts))
    world.Barrier()


def hang() -> None:
    """Let the last rank come too late for a collective: those that wait for it find out where all are, and raise."""
    is_late = dist.get_rank() == dist.get_world_size() - 1
    if is_late:
        time.sleep(3 * HANG_SECONDS)
    work, text = dist.all_reduce(torch.ones(1), async_op=True), ""
    try:
        work.wait(timedelta(seconds=HANG_SECONDS))
    except dist.DistBackendError as error:
        text = str(error)
    assert is_late or "has not entered all_reduce" in text, text


def tell() -> None:
    """Print, on rank 0, what rank 0 and the rank with the most of each have counted."""
    names = ("messages", "bytes", "datagrams", "sockets", "threads", "kilobytes")
    everybody = world.gather(counted)
    if everybody is None:
        return
    for steps in zip(*everybody, strict=True):
        counts = [each for _, _, each in steps]
        line = {"ranks": len(counts), "step": steps[0][0], "seconds": round(max(each for _, each, _ in steps), 3)}
        line |= {name: [counts[0][i], max(each[i] for each in counts)] for i, name in enumerate(names)}
        print(json.dumps(line), flush=True)


def meet() -> None:
    """Wait until all processes have started: MPI's start polls, and leaves no time to those that come later."""
    path = Path(os.environ["TMPDIR"], f"scaling-{os.environ['PMIX_NAMESPACE']}")
    with path.open("ab", buffering=0) as file:
        file.write(b".")
    while path.stat().st_size < int(os.environ["OMPI_COMM_WORLD_SIZE"]):
        time.sleep(0.2)


meet()
setattr(channel.socket, "socket", Datagrams)  # noqa: B010  # mypy takes no class's place by assignment
from mpi4py import MPI  # noqa: E402  # as a program that starts MPI itself

world = MPI.COMM_WORLD
node = world.Get_rank() // NODE
os.environ[environment.NODE_KEY] = f"node {node}"
messages, counted = Messages(world), []
count("init_process_group", lambda: dist.init_process_group(timeout=timedelta(seconds=600)))
count("new_group of all", dist.new_group)
count("new_subgroups(2)", lambda: dist.new_subgroups(2))
count("init_device_mesh", lambda: torch.distributed.init_device_mesh("cpu", (2, world.Get_size() // 2)))
objects: list[Any] = [None] * world.Get_size()
count("all_gather_object, 100 B", lambda: dist.all_gather_object(objects, b"x" * 100))
dist.broadcast_object_list([b""])  # a group's first one makes a communicator too
count("broadcast_object_list, 100 B", lambda: dist.broadcast_object_list([b"x" * 100]))
count(f"rest of {REST_SECONDS:g} s", lambda: time.sleep(REST_SECONDS))
count("hang", hang)
count("destroy_process_group", dist.destroy_process_group)
tell()
MPI.Finalize()
sys.stdout.flush()
os._exit(0)  # Python's end touches each object that it has: a copy of all that the processes share, 150 MB each
