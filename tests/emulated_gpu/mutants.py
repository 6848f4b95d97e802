"""Mutants of the NCCL backend: ``python -m tests.emulated_gpu.mutants [NUMBER …]`` breaks one line at a time.

Each line below guards an order or a lifetime. A copy of the project in which it is broken must fail the
tests on emulated GPUs, on one rank or on two; what survives is printed, and the exit status is 1.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mutants import PYTEST, Mutant, copy_project, run, try_all

EMULATED = (*PYTEST, "-p", "tests.emulated_gpu.plugin", "--with-mpi")
SHARING = "test_input_and_output_that_share_memory"
STREAMS, BACKEND, COMMUNICATORS, CALLS = "streams.py", "backend.py", "communicators.py", "calls.py"

# file of the backend, a part of it that occurs once, what stands there instead
LINES = [
    (STREAMS, "        event.wait(self.side)\n", ""),
    (STREAMS, "        event.record(stream)\n", ""),
    (STREAMS, "        pending.end.wait(current)\n", ""),
    (STREAMS, "        if current is pending.begun_on:\n", "        if True:\n"),
    (STREAMS, "                call.end.wait(call.begun_on)\n", ""),
    (STREAMS, "            if not is_capturing:\n", "            if True:\n"),
    (STREAMS, "        self.keepalive = keepalive  #", "        self.keepalive = ()  #"),
    (STREAMS, "        self.under_way.append(call)\n", ""),
    (STREAMS, "            call.is_captured = self.is_in_graph = True\n            return\n", "            pass\n"),
    (
        STREAMS,
        "        if self.is_capturing():\n            self.is_in_graph = True\n",
        "        if False:\n            self.is_in_graph = True\n",
    ),
    (STREAMS, "        self._last.record(current)\n", ""),
    (STREAMS, "                self.cuda.synchronize(self.device)\n                return\n", "                pass\n"),
    (STREAMS, "with self.on_device(), beside", "with beside"),
    (STREAMS, "self.on_device(), beside_captures()", "self.on_device()"),
    (STREAMS, "        with streams.on_device():\n            for stream", "        if True:\n            for stream"),
    (STREAMS, "        exchange(ctypes.byref(mode))\n", "        pass\n"),
    (BACKEND, "            with link.streams.on_device():\n", "            if True:\n"),
    (BACKEND, "        self.record(call)\n", ""),
    (BACKEND, "        self.record(made)\n", ""),
    (
        BACKEND,
        "                calls.add(*words)\n            self._run",
        "                pass\n            self._run",
    ),
    (BACKEND, "link is None or link.streams.is_in_graph else", "link is None else"),
    (STREAMS, "if not self.has_ended and not self.is_captured and", "if not self.has_ended and"),
    (STREAMS, "        while self.under_way and self.under_way[0].look():\n", "        while self.under_way:\n"),
    (STREAMS, "            if call.owns_end and call.error is None:\n", "            if call.owns_end:\n"),
    (STREAMS, "            if call.owns_end and call.error is None:\n", "            if call.error is None:\n"),
    (STREAMS, "                    self._last = self.cuda.Event()\n", "                    pass\n"),
    (STREAMS, "            streams.fork(stream)\n", "            pass\n"),
    (STREAMS, "            streams.fork(stream)\n", "            streams.fork(streams.current())\n"),
    (STREAMS, "with self.on_device(), self.cuda.stream(self.side)", "with self.cuda.stream(self.side)"),
    (STREAMS, "                current.synchronize()\n", "                pass\n"),
    (STREAMS, "                call.finish(error)\n", ""),
    (STREAMS, "            self.fail_all(self.failure)\n", "            pass\n"),
    (STREAMS, "            event = self._free_events.pop()\n", "            raise IndexError\n"),
    (STREAMS, "            self.error, self.keepalive = error, ()\n", "            self.error = error\n"),
    (
        STREAMS,
        "        if not pending.has_ended:\n            current = self",
        "        if 1:\n            current = self",
    ),
    (STREAMS, " or call.nbytes >= SWEEP_BYTES", ""),
    (
        STREAMS,
        "                    with streams.on_side():\n                        call.finish()\n",
        "                    call.finish()\n",
    ),
    (BACKEND, "(queue, finish), nbytes)", "(queue,), nbytes)"),
    (BACKEND, "(queue, finish), nbytes)", "(finish,), nbytes)"),
    (CALLS, "    return send if is_in_place else send.clone()\n", "    return send\n"),
    (BACKEND, "        send = apart(row, self.rank, send, recv, counts)\n", ""),
    (
        BACKEND,
        "            queue = partial(function, apart(row, self.rank, send, recv), recv",
        "            queue = partial(function, send, recv",
    ),
    (BACKEND, "                link.streams.mark(current)\n", ""),
    (COMMUNICATORS, "                self.check_live()\n            try:", "                pass\n            try:"),
    (COMMUNICATORS, "            if self.ended is not None or self._is_ending:\n                return None\n", ""),
    (
        COMMUNICATORS,
        "            if self.ended is not None or self._is_ending:\n",
        "            if self.ended is not None:\n",
    ),
    (COMMUNICATORS, "            if self._is_ending:\n                return False\n", ""),
    (COMMUNICATORS, "                self.check_live()  # the watchdog", "                pass  # the watchdog"),
    (COMMUNICATORS, "            self._await_device()\n", ""),
    (COMMUNICATORS, "lambda peer: (min(peer, self.rank), max(peer, self.rank))", "lambda peer: 0"),
    (COMMUNICATORS, 'with self.failing("destroy"):', "if True:"),
    (COMMUNICATORS, "                link.streams.fail_all(self.ended)\n", "                pass\n"),
    (COMMUNICATORS, "                link.streams.failure = self.ended", "                pass"),
    (
        COMMUNICATORS,
        "                end_apart(streams, comm.abort, ABORT_SECONDS)\n                self.check_live()\n",
        "                pass\n",
    ),
    (COMMUNICATORS, "            if self.ended is not None:\n                return True\n", ""),
    (COMMUNICATORS, "if group is not None and not self._is_ending:", "if group is not None:"),
]
MUTANTS = [Mutant(f"hpcdist/backends/nccl/{file}", old, new, "") for file, old, new in LINES]


def judge(folder: Path) -> str | None:
    """Return what catches the mutant in a folder, or None."""
    for ranks, files in (
        (1, ("watch.py", "lifetimes.py", "streams.py", "torch_nccl.py", "two_gpus.py")),
        (2, ("lifetimes.py", "groups_and_messages.py", "calls_differ.py", f"collectives.py::{SHARING}")),
    ):
        failure = run(folder, ranks, *EMULATED, *(f"tests/gpu/test_{each}" for each in files))
        if failure is not None:
            return f"{ranks} ranks: {failure}"
    return None


def main(numbers: list[int]) -> int:
    """Try the mutants and return the exit status."""
    with tempfile.TemporaryDirectory() as temporary:
        copy_project(Path(temporary))
        if failure := judge(Path(temporary)):
            sys.exit(f"the tests fail without a mutant: {failure}")
    chosen = ((number, MUTANTS[number]) for number in numbers or range(len(MUTANTS)))
    return int(try_all(chosen, lambda folder, _: judge(folder)) > 0)


if __name__ == "__main__":
    sys.exit(main([int(each) for each in sys.argv[1:]]))
