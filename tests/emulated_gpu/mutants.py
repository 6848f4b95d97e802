"""Mutants of the NCCL backend: ``python -m tests.emulated_gpu.mutants [NUMBER …]`` breaks one line at a time.

Each line below guards an order or a lifetime. A copy of the project in which it is broken must fail the unit tests, or
the tests on emulated GPUs on one rank or on two; what survives is printed, and the exit status is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
NCCL = "src/hpcdist/backends/nccl"
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--color=no")
EMULATED = (*PYTEST, "--timeout", "60", "-p", "tests.emulated_gpu.plugin", "--with-mpi")
STREAMS, BACKEND, COMMUNICATORS = "streams.py", "backend.py", "communicators.py"

MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
MPI["OMP_NUM_THREADS"] = "1"

# file, a part of it that occurs once, what stands there instead
MUTANTS = [
    (STREAMS, "        self._before.wait(self.side)\n", ""),
    (STREAMS, "        self._before.record(stream)\n", ""),
    (STREAMS, "        self.end.wait(current)\n", ""),
    (STREAMS, "        if current is self.flight.begun_on:\n", "        if True:\n"),
    (STREAMS, "                flight.end.wait(flight.begun_on)\n", ""),
    (STREAMS, "            if not is_capturing:\n", "            if True:\n"),
    (STREAMS, "        self.held = held\n", "        self.held = ()\n"),
    (STREAMS, "        self.under_way.append(work.flight)\n", ""),
    (STREAMS, "            work.is_captured = True\n            return work\n", "            pass\n"),
    (STREAMS, "        if not self.is_capturing():\n", "        if True:\n"),
    (STREAMS, "            self._last.record(current)\n", ""),
    (STREAMS, "with self.cuda.device(self.device), self._library", "with self._library"),
    (STREAMS, "self.cuda.device(self.device), self._library.beside_captures()", "self.cuda.device(self.device)"),
    (STREAMS, "return not self.is_captured and super()", "return super()"),
    (STREAMS, "        if not under_way or not under_way[0].work().has_ended():\n", "        if not under_way:\n"),
    (STREAMS, "* 2 if last.has_ended() else", "* 2 if True else"),
    (STREAMS, "                rest = middle\n", "                ended = middle + 1\n"),
    (STREAMS, "            if failed:\n", "            if False:\n"),
    (STREAMS, "            if flight.owns_end:\n", "            if True:\n"),
    (STREAMS, "                    self._last = self.cuda.Event()\n", "                    pass\n"),
    (STREAMS, "            streams.fork(stream)\n", "            pass\n"),
    (STREAMS, "            streams.fork(stream)\n", "            streams.fork()\n"),
    (STREAMS, "with self.cuda.device(self.device), self.cuda.stream(self.side)", "with self.cuda.stream(self.side)"),
    (STREAMS, "                current.synchronize()\n", "                pass\n"),
    (STREAMS, "                flight.work().fail(error)\n", ""),
    (STREAMS, "            self.fail_all(self.failure)\n", "            pass\n"),
    (STREAMS, "            event = self._free_events.pop()\n", "            raise IndexError\n"),
    (STREAMS, "        self.held = ()\n        work = self", "        work = self"),
    (STREAMS, "        if not self._done:\n            current = self", "        if 1:\n            current = self"),
    (STREAMS, " or work.flight.nbytes >= SWEEP_BYTES", ""),
    (STREAMS, "{streams: streams.record_end() for streams in last}", "{streams: streams._before for streams in last}"),
    (BACKEND, "        held = (queue, finish)\n", "        held = (queue,)\n"),
    (BACKEND, "        held = (queue, finish)\n", "        held = (finish,)\n"),
    (BACKEND, "            send = send.clone()  #", "            pass  #"),
    (BACKEND, "            with streams.on_side():\n                finish()\n", "            finish()\n"),
    (BACKEND, "            link.streams.mark(current)\n\n    def start", "\n    def start"),
    (COMMUNICATORS, "                raise self.ended\n            try:", "                pass\n            try:"),
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
    (COMMUNICATORS, "                link.streams.fail_all(self.ended)\n", ""),
    (COMMUNICATORS, "                link.streams.failure = self.ended", "                pass"),
    (COMMUNICATORS, "                comm.abort()\n                raise self.ended\n", "                pass\n"),
    (COMMUNICATORS, "            if self.ended is not None:\n                return True\n", ""),
    (COMMUNICATORS, "if self.group is not None and not self._is_ending:", "if self.group is not None:"),
]


def run(folder: Path, ranks: int, *arguments: str) -> str | None:
    """Run tests in a copy of the project; return the first failure, or None."""
    environment = {**os.environ, **MPI, "PYTHONPATH": f"{folder}/src:{folder}"}
    command = [sys.executable, *arguments]
    if ranks:
        command = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", str(ranks), *command]
    with (folder / "out").open("w+b") as out:
        try:
            status = subprocess.run(
                command, cwd=folder, env=environment, stdout=out, stderr=out, timeout=300
            ).returncode
        except subprocess.TimeoutExpired:
            return "no end within 300 s"
        if status == 0:
            return None
        out.seek(0)
        lines = out.read().decode(errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), f"status {status}")


def judge(folder: Path) -> str | None:
    """Return what catches the mutant in a folder, or None."""
    for ranks, arguments in (
        (0, (*PYTEST, "tests/unit/test_nccl_calls.py", "tests/unit/test_nccl_watch.py")),
        (1, (*EMULATED, "tests/gpu/test_lifetimes.py", "tests/gpu/test_streams.py")),
        (2, (*EMULATED, "tests/gpu/test_lifetimes.py", "tests/gpu/test_groups_and_messages.py")),
    ):
        failure = run(folder, ranks, *arguments)
        if failure is not None:
            return f"{'unit tests' if not ranks else f'{ranks} ranks'}: {failure}"
    return None


def main(numbers: list[int]) -> int:
    """Try the mutants and return the exit status."""
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if failure := judge(folder):
            sys.exit(f"the tests fail without a mutant: {failure}")
        for number in numbers or range(len(MUTANTS)):
            name, old, new = MUTANTS[number]
            path = folder / NCCL / name
            text = path.read_text()
            assert text.count(old) == 1, (number, old, text.count(old))
            path.write_text(text.replace(old, new))
            began = time.monotonic()
            caught = judge(folder)
            path.write_text(text)
            survivors += caught is None
            line = next(each.strip() for each in old.splitlines() if each.strip())
            print(
                f"{number:2d} {name}: {line[:60]!r}: {caught or 'SURVIVES'} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main([int(each) for each in sys.argv[1:]]))
