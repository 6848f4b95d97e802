"""Flight recorder: writes the last calls of this rank to a file for torch's own tool.

``torchfrtrace`` reads one pickle for each rank, in the format of ProcessGroupNCCL's recorder (version 2.10). The ring
of calls is ``core.journal``'s and is only read here. The resolution of times is the watchdog's tick, because calls read
no clock.
"""

from __future__ import annotations

import math
import os
import pickle
import stat
import tempfile
import time
from bisect import bisect_right
from collections import deque
from contextlib import suppress
from typing import Any

from hpcdist.core.journal import ONE_SIDED, RING, CallRecord
from hpcdist.core.table import ROWS, Shape
from hpcdist.core.world import WORLD
from hpcdist.torch_bridge.features import has
from hpcdist.watch import calls_under_way

VERSION = "2.10"
LENGTH_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

# calls without a row of the table, by the tool's names
NAMES = {
    "all_gather_object": "all_gather",
    "gather_object": "gather",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "scatter",
    "new_group": "split",
    "shrink_group": "split",
    "isend": "send",
    "irecv": "recv",
    "send_object_list": "send",
    "recv_object_list": "recv",
}
# the tool knows only NCCL's recorder: its names
NCCL_NAMES = {
    "all_gather_single": "_all_gather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
    "barrier": "all_reduce_barrier",
    "split": "all_reduce_barrier",
}
KNOWS_GLOO = has("`all_gather_single` and the other names in `_single`")
MAKER = "gloo" if KNOWS_GLOO else "nccl"  # the tool accepts the names of torch's own libraries only, not "mpi"
KNOWN = {*ROWS, "send", "recv"}
UNKNOWN = {"create_group", *ONE_SIDED}  # made by some ranks only; unknown to the tool


class Recorder:
    """The times of calls, and the place of their dump."""

    def __init__(self, name: str) -> None:
        self.name = name  # the name of the job, the same on all ranks
        self.ticks: deque[tuple[int, int]] = deque(maxlen=4096)  # nanoseconds, and the calls until then
        length = next((os.environ[name] for name in LENGTH_VARIABLES if os.environ.get(name)), None)
        if length is not None and length.isdigit() and int(length) > 0:
            RING.resize(int(length))

    def made(self) -> int:
        return RING.past + sum(group.sequence for group in list(WORLD.groups.values()) if group.backends)

    def tick(self) -> None:
        made = self.made()
        if not self.ticks or self.ticks[-1][1] != made:
            self.ticks.append((time.time_ns(), made))

    def dump(self, rank: int) -> str:
        """Write this rank's trace and return its path (torch's variable and the rank, or in a folder of the job's own).

        OSError if it cannot be written, or the job's folder is another user's.
        """
        self.tick()
        if prefix := next((os.environ[name] for name in FILE_VARIABLES if os.environ.get(name)), ""):
            path = f"{prefix}{rank}"
            folder = os.path.dirname(path) or "."
            os.makedirs(folder, exist_ok=True)
        else:
            folder = os.path.join(tempfile.gettempdir(), f"hpcdist_trace_{self.name}")
            path = os.path.join(folder, f"rank_{rank}")
            make_private(folder)
        # a new random name: at one that can be guessed, in /tmp, others may have put a link
        descriptor, unfinished = tempfile.mkstemp(".part", f"{os.path.basename(path)}.", folder)
        try:
            with open(descriptor, "wb") as file:
                pickle.dump(self.trace(), file)
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
        return path

    def trace(self) -> dict[str, Any]:
        """Return the trace in the form of torch's tool."""
        calls = list(RING.calls)
        first = self.made() - len(calls)
        groups = list(WORLD.groups.values())
        threads = {id(each.call): each.thread for group in groups for each in group.journal.blocked()}
        waiting = {id(work._call) for backend in WORLD.backends() for work in backend.pending()}
        by_journal = {id(group.journal): group for group in groups}
        times = list(self.ticks) or [(time.time_ns(), 0)]
        made = [number for _, number in times]
        entries = []
        for index, raw in enumerate(calls):
            group = by_journal.get(id(raw[0]))
            if group is None or raw[2] in UNKNOWN:
                continue  # for example destroyed
            thread, record = threads.get(id(raw)), first + index
            state = "started" if thread is not None else "scheduled" if id(raw) in waiting else "completed"
            created, _ = times[min(bisect_right(made, record), len(times) - 1)]
            frames = [] if thread is None else calls_under_way.stack(thread)
            entries.append(entry(CallRecord(*raw), group, record, state, created, frames))
        return {
            "version": VERSION,
            "pg_config": {
                each.group_name: {"name": each.group_name, "desc": each.group_desc, "ranks": str(list(each.ranks))}
                for each in groups
            },
            "pg_status": {
                group.group_name: {
                    "last_enqueued_collective": group.journal.sequence,
                    "last_started_collective": group.journal.sequence,
                    "last_completed_collective": group.journal.sequence - bool(group.journal.blocked()),
                }
                for group in groups
            },
            "entries": entries,
        }


def make_private(folder: str) -> None:
    """Make a folder that only this user can read; PermissionError if there is anything else, or a link."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user's own")


def entry(
    call: CallRecord, group: Any, record: int, state: str, created: int, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    name = NAMES.get(call.name) or (call.name if call.name in KNOWN else "barrier")  # a name that the tool knows
    given, received = sizes(call, group.rank(), group.size())
    dtype = str(call.dtype).removeprefix("torch.").capitalize() if call.dtype is not None else ""
    is_message = name in ("send", "recv")
    if is_message:
        me, peer = group.rank(), call.root if call.root is not None else -1
        name = f"send {me}->{peer}" if name == "send" else f"recv {me}<-{peer}"
    if not KNOWS_GLOO:
        name = NCCL_NAMES.get(name, name)
    return {
        "record_id": record,
        "pg_id": int(group.group_name) if group.group_name.isdigit() else 0,
        "process_group": (group.group_name, group.group_desc),
        "collective_seq_id": 0 if is_message else call.number,
        "p2p_seq_id": call.number if is_message else 0,
        "op_id": record,
        "profiling_name": f"{MAKER}:{name}",
        "time_created_ns": created,
        "duration_ms": None,
        "input_sizes": [given],
        "input_dtypes": [dtype],
        "output_sizes": [received],
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": created,
        "time_discovered_completed_ns": created if state == "completed" else None,
        "retired": state == "completed",
        "timeout_ms": int(group.timeout.total_seconds() * 1000),
        "is_p2p": is_message,
        "frames": frames,
        "thread_id": "",
        "thread_name": "",
    }


def sizes(call: CallRecord, rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """Return the sizes of input and output; the record has one of them, and the row their relation."""
    shape = list(call.shape) if call.shape is not None else []
    row = ROWS.get(call.name)
    if row is None or call.shape is None:
        return shape, shape
    count = math.prod(call.shape)
    if row.shape is Shape.GATHER:
        return shape, [count * ranks]
    if row.shape is Shape.SCATTER:
        is_output = row.rooted and call.root != rank  # only the root of a scatter sends
        return ([count * ranks], shape) if is_output else (shape, [count // ranks])
    return shape, shape
