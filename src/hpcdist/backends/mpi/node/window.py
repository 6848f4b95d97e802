"""Shared window of a node: memory that its ranks share, and flags that tell which data has been written.

`MPI_Comm_split_type(MPI_COMM_TYPE_SHARED)` decides which ranks share; a node key splits them further, so that several
nodes can be imitated on one machine. Each rank makes a file of /dev/shm (``core.memory_file``), its segment, which its
node peers map too. It is not an MPI window, because MPI_Win_free waits for all ranks of the node, so that a rank which
destroys a group would wait for one that keeps it, and because MPICH over libfabric ends in an error if a window is not
freed.

    | flag (one page) | slot 0 | slot 1 | slot 2 |

A rank puts data in its own segment, which the others read, or each part in the segment of the rank that it is for (the
stacks of `slices`); two ranks never write to one place. The flag is one aligned 8-byte counter that only the owner
increments. All ranks of a group run the same collectives in the same order, so they count the same steps, and flag >= t
means: the owner's data of step t lies in the window, and the owner has finished all its reads before step t. There are
three slots, so that a rank can write chunk c+1 while a slower peer still reads chunk c-1.

The memory ordering is as correct as with MPI_Win_sync (MPI-4.1 chapter 12.7, unified model):
- publishing: data stores, `fence` (a full one of the processor), flag store. No processor can show the flag before
  the data.
- consuming: flag load until it reached the step, `fence`, data loads. No load of data is taken before the flag.
- reusing: a slot is written only after every node peer's flag passed the step that follows its reads of that slot; a
  peer's loads are complete before its later `fence`, hence before the flag that permits the overwrite.
- tearing: the counter is written and read by one 8-byte move (memoryview of format "q" on an aligned address), and it
  only grows, so a stale value delays and never misleads.
- the compiler cannot move any of it: each load, store and barrier is a separate call of the interpreter.

A waiting rank must keep driving MPI progress: another rank may be in a send to it that only its own MPI can complete.
So the wait calls `MPI_Iprobe`; it yields the processor, because there may be more ranks than cores, as on a laptop; it
calls `poll` every few milliseconds, which may raise (timeout, revoked communicator); and after 20 ms it naps, because a
peer that is so late still computes, and others can use the core. An asynchronous call naps at once if the node has no
second core for each rank: it runs beside the computation with which it should overlap.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import cache
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import address
from hpcdist.backends.mpi.node.places import Places
from hpcdist.core import memory_file
from hpcdist.core.waiting import nap

PAGE_BYTES = mmap.PAGESIZE
SLOT_BYTES = 2 << 20  # bytes; 3 slots and a page are 6 MiB for each rank; measured best with more ranks than cores
SLOTS = 3
LINE_BYTES = 64  # parts begin on cache lines, so that no line has two writers
SPINS = 200  # reads of a flag before the first yield: about 10 µs, as long as a short reduction
CROWDED_SPINS = 5  # with more ranks than cores the peer probably waits for this core
POLL_SECONDS = 0.004
NAP_AFTER_SECONDS = 0.02
CHUNK_BYTES = 512 << 10  # bytes of the smallest chunk of a pipeline; a tensor of four chunks or more takes larger ones
KEPT_SLICES = 64  # how many sizes' slices are kept (``slices``)

Step = Callable[[int, int, int], None]


@cache
def fences() -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions that together, called in order, are a full memory barrier of the processor.

    On x86 taking a lock is one (a locked instruction), and a semaphore of the system takes half the time of Python's
    lock. On other processors accesses before a release stay before it, accesses after an acquisition stay after it,
    and the second acquisition follows the first release.
    """
    lock = threading.Lock()
    if platform.machine() in ("x86_64", "AMD64", "i686"):
        try:
            semaphore = multiprocessing.get_context("fork").Semaphore(0)
        except (ImportError, OSError):  # the system has none, or no memory for one
            return lock.acquire, lock.release
        return semaphore.release, semaphore.acquire

    def begin() -> None:
        lock.acquire()
        lock.release()
        lock.acquire()

    return begin, lock.release


def fence() -> None:
    """Make earlier stores visible before later loads: a full memory barrier."""
    begin, end = fences()
    begin()
    end()


def map_segments(nbytes: int, node: MPI.Intracomm) -> tuple[list[torch.UntypedStorage], str]:
    """Return zeroed memory of each rank of a node, which all of them share; every rank of it calls.

    The second result is this rank's error, if it had no room for its segment or could not map another's.
    """
    name, descriptor, failure = "", -1, ""
    segments: list[torch.UntypedStorage] = []
    try:
        try:
            descriptor, name = memory_file.create(nbytes)
        except OSError as error:
            failure = str(error)
        names = node.allgather(name)
        try:
            for each in names if all(names) else ():
                os.close(memory_file.open_by_name(each))  # torch would create a missing file
                path = str(memory_file.FOLDER / each)
                segments.append(torch.UntypedStorage.from_file(path, True, nbytes))  # type: ignore[arg-type]
        except (OSError, RuntimeError) as error:
            failure = str(error)
        node.Barrier()
        memory_file.remove(name)  # named only while it is empty, so that a killed job leaves no memory behind
        try:
            if descriptor >= 0:
                memory_file.reserve(descriptor, nbytes)  # otherwise a later write could be a SIGBUS
        except OSError as error:
            failure = f"{memory_file.no_room(os.uname().nodename, memory_file.free_bytes(), nbytes)} ({error})"
    finally:
        memory_file.remove(name)
        if descriptor >= 0:
            os.close(descriptor)
    return segments, failure


def warn_of_threads(ranks: int, threads: int, cores: int) -> None:
    """Warn if torch has more threads on a node than there are cores: OpenMP's threads wait for each other actively.

    On 2 ranks of 4 threads on 4 cores a sum of 256 KiB took 8 ms in place of 0.06, in a collective or elsewhere.
    """
    if threads > max(ranks, cores):
        warnings.warn(
            f"{ranks} ranks with {threads} torch threads in all share {cores} cores: sums take many times as long. "
            f"export OMP_NUM_THREADS={max(1, cores // ranks)}",
            RuntimeWarning,
            stacklevel=2,
        )


def stall(
    flag: memoryview, step: int, spins: int, naps_after: float, progress: Callable[[], Any], poll: Callable[[], None]
) -> None:
    """Wait until another process has increased an aligned counter, of format "q", to a step.

    It yields after ``spins`` reads, and sleeps between reads after ``nap_after`` seconds. ``progress`` drives MPI, at
    each read; ``poll`` is called every few milliseconds, and its exception ends the wait.
    """
    for _ in range(spins):
        if flag[0] >= step:
            return
    give_way, now = os.sched_yield, time.monotonic
    began = polled = now()
    while flag[0] < step:
        give_way()
        progress()
        moment = now()
        if moment - polled > POLL_SECONDS:
            polled = moment
            poll()
        if moment - began >= naps_after:
            nap(moment - began)


class NodeWindow:
    """The window of a communicator's ranks on one node, divided into slots, and objects that calls keep.

    The group's first use of shared memory makes it, on all of its ranks together. It takes over the node's
    communicator, and frees it. Every rank raises RuntimeError if /dev/shm of a node has no room, or its ranks do not
    see the same one. ``communicator.poll`` is called every few milliseconds of waiting; its exception ends the call.
    """

    def __init__(self, places: Places, communicator: Communicator) -> None:
        self.node = node = places.node
        self.rank, self.size = node.rank, node.size
        self._communicator = communicator
        self.progress: Callable[[], Any] = node.Iprobe  # called at each read of a wait: drives MPI
        allowed = node.allgather((os.sched_getaffinity(0), torch.get_num_threads()))
        cores = len(set().union(*(own for own, _ in allowed)))  # a launcher may bind each rank to its own
        if self.rank == 0:
            warn_of_threads(self.size, sum(threads for _, threads in allowed), cores)
        self._spins = SPINS if node.size <= cores else CROWDED_SPINS
        self._gives_way = 2 * node.size > cores  # a second busy thread of each rank has no core of its own
        self.segment_bytes = PAGE_BYTES + SLOTS * SLOT_BYTES
        self._memory, failure = map_segments(self.segment_bytes, node)
        failures = [each for each in places.comm.allgather(failure) if each]
        if failures:
            raise RuntimeError(f"no shared-memory window on {len(failures)} of {places.comm.size} ranks: {failures[0]}")
        mapped: list[Any] = [address(each.data_ptr(), each.nbytes()) for each in self._memory]
        buffers = [memoryview(each) for each in mapped]
        self._flags = [buffer[:8].cast("q") for buffer in buffers]
        self._mates = [flag for r, flag in enumerate(self._flags) if r != self.rank]
        self._own = self._flags[self.rank]
        segments = [torch.frombuffer(buffer, dtype=torch.uint8)[PAGE_BYTES : self.segment_bytes] for buffer in buffers]
        # the memory of each slot, by its number and by node rank
        self.slots = [[each[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for each in segments] for i in range(SLOTS)]
        self.addresses = [[part.data_ptr() for part in slot] for slot in self.slots]
        self.peers = [r for r in range(self.size) if r != self.rank]
        self.step = 0
        self.free = [0] * SLOTS  # for each slot, the step that every peer must have published before it is written
        self.turn = 0  # the next slot

    def publish(self) -> int:
        """Set the flag: this rank's part of a step lies in its segment; return the step's number."""
        self.step = step = self.step + 1
        fence()
        self._own[0] = step
        return step

    def wait(self, step: int) -> None:
        """Wait until every node peer has published `step`; its data may be read afterwards."""
        for flag in self._mates:
            if flag[0] < step:
                self._stall(flag, step)
        fence()

    def wait_for(self, rank: int, step: int) -> None:
        """Wait until one node rank has published `step`."""
        flag = self._flags[rank]
        if flag[0] < step:
            self._stall(flag, step)
        fence()

    def _stall(self, flag: memoryview, step: int) -> None:
        if self._gives_way and self._communicator.is_background():  # the computation uses the core
            stall(flag, step, 0, 0.0, self.progress, self._communicator.poll)
        else:
            stall(flag, step, self._spins, NAP_AFTER_SECONDS, self.progress, self._communicator.poll)

    def exchange(self, block: int, chunk: int, put: Step, get: Step) -> None:
        """Run put and get over all chunks of a block, with the puts one chunk ahead of the gets.

        The lengths of block and chunks in bytes are the same on all ranks of the node. ``put`` takes a slot's number,
        a chunk's offset in the block, and its length, and writes to this rank's slot; ``get`` takes the same, and
        reads the others'.
        """
        chunk = min(chunk, block)
        count = -(-block // chunk)

        def publish(c: int) -> tuple[int, int, int, int]:
            turn, offset = self.turn, c * chunk
            length = min(chunk, block - offset)
            self.wait(self.free[turn])
            put(turn, offset, length)
            step = self.publish()
            self.free[turn] = step + 2
            self.turn = (turn + 1) % SLOTS
            return step, turn, offset, length

        ahead = publish(0)
        for c in range(count):
            step, turn, offset, length = ahead
            if c + 1 < count:
                ahead = publish(c + 1)
            self.wait(step)
            get(turn, offset, length)
        self.free[turn] = step + 1

    def share(self, root: int, place: int, nbytes: int, chunk: int) -> None:
        """Copy memory of one rank of the node to the others, chunk by chunk; they read while it writes the next one."""
        for offset in range(0, nbytes, chunk):
            turn, length = self.turn, min(chunk, nbytes - offset)
            if self.rank == root:
                self.wait(self.free[turn])
                memmove(self.addresses[turn][root], place + offset, length)
                step = self.publish()
            else:
                step = self.publish()
                self.wait_for(root, step)
                memmove(place + offset, self.addresses[turn][root], length)
            self.free[turn] = step + 1
            self.turn = (turn + 1) % SLOTS

    def beginnings(self, nbytes: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Return the first bytes of each slot, by its number and by node rank."""
        return [[part[:nbytes].view(dtype) for part in slot] for slot in self.slots]

    def collect(self, places: Sequence[int], sizes: Sequence[int], chunk: int) -> None:
        """Copy this rank's part to the node peers and theirs to this rank, given the address here and bytes of each."""
        rank, addresses = self.rank, self.addresses

        def put(turn: int, offset: int, length: int) -> None:
            if offset < sizes[rank]:
                memmove(addresses[turn][rank], places[rank] + offset, min(length, sizes[rank] - offset))

        def get(turn: int, offset: int, length: int) -> None:
            for peer in self.peers:
                if offset < sizes[peer]:
                    memmove(places[peer] + offset, addresses[turn][peer], min(length, sizes[peer] - offset))

        self.exchange(max(sizes), chunk, put, get)

    def close(self) -> None:
        """Release the memory, and free the communicator; may be called again."""
        if self.node == MPI.COMM_NULL:
            return
        self.slots, self._memory = [], []
        self._flags, self._mates = [], []
        self._own = memoryview(bytearray(8)).cast("q")
        self.node.Free()
