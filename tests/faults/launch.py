"""Jobs that go wrong on purpose: how they are started, what their ranks tell, and how they are ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.core.waiting import wait_until
from tests import forked
from tests.programs import HAS_ULFM, LIBRARY, mpirun_command
from tests.programs import MPIRUN as MPIRUN  # for the tests here
from tests.programs import environment as settings

Self = TypeVar("Self", bound="Started")  # typing has one of its own from Python 3.11 on
HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
LAUNCHERS = {
    "openmpi": {**({"openmpi-ulfm": ["--with-ft", "ulfm"]} if HAS_ULFM else {}), "openmpi": []},
    "mpich": {"mpich": []},
    "none": {},
}[LIBRARY]

IS_WHOLE = os.environ.get("HPCDIST_FAULTS") == "all"  # every case, not only those that a change must pass


def some(every: list[Any], chosen: int) -> list[Any]:
    """Return the first few cases of a test, and all of them with HPCDIST_FAULTS=all."""
    return every if IS_WHOLE else every[:chosen]


FIRST = some(list(LAUNCHERS), 1)  # for what does not depend on how MPI was started
PLAIN = [each for each in LAUNCHERS if each != "openmpi-ulfm"]  # a rank's death ends the job
ULFM = [each for each in LAUNCHERS if each == "openmpi-ulfm"]
START_SECONDS = 90.0  # a busy machine takes long to import torch in each rank


def command(
    launcher: str,
    ranks: int,
    script: Path,
    arguments: list[str],
    options: list[str] | None = None,
    python: list[str] | None = None,
) -> list[str]:
    """Return the command line that starts a job."""
    return mpirun_command(ranks, [script, *arguments], [*LAUNCHERS[launcher], *(options or [])], python)


# what a script begins with that is given as text
IMPORTS = """\
import os, signal, sys, threading, time
from datetime import timedelta
import torch
import hpcdist as dist
from tests.faults.telling import ME, imitate_nodes, tell
"""


class Started:
    """A job under way, and what its ranks have told: a line of JSON for each event.

    Args:
        command: the command line that starts it.
        environment: its environment.
        folder: where its output goes; it is removed with this object.

    Attributes:
        process: the launcher.
        ended: when it was seen to have ended.
    """

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.folder = folder
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)  # tests still read after close()
        self.output, self.errors = self.folder / "out", self.folder / "err"
        with open(self.output, "wb") as out, open(self.errors, "wb") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        self.ended: float | None = None

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return what the ranks have told so far."""
        text, decoder = self.output.read_text(errors="replace"), json.JSONDecoder()
        found = []
        for start in re.finditer(r'\{"rank"', text):  # launchers may write the lines of two ranks as one
            with contextlib.suppress(json.JSONDecodeError):  # it is still being written
                found.append(decoder.raw_decode(text, start.start())[0])
        return [each for each in found if name is None or each["event"] == name]

    def stderr(self) -> str:
        """Return what was written to stderr so far."""
        return self.errors.read_text(errors="replace")

    def pids(self) -> dict[int, int]:
        """Return the processes of the ranks that have told something."""
        return {each["rank"]: each["pid"] for each in self.events()}

    def wait(self, event: str, count: int = 1, seconds: float = START_SECONDS) -> list[dict[str, Any]]:
        """Wait until so many ranks told an event or the job ended; AssertionError when neither happens in time."""
        deadline = time.monotonic() + seconds
        while len(found := self.events(event)) < count:
            if self.process.poll() is not None:
                self.ended = self.ended or time.time()
                return self.events(event)
            assert time.monotonic() < deadline, (
                f"{seconds} s over, {len(found)} of {count} told {event!r}\n{self.events()}\n{self.stderr()}"
            )
            time.sleep(0.02)
        return found

    def expect(self, event: str, count: int = 1, seconds: float = START_SECONDS) -> list[dict[str, Any]]:
        """Wait until so many ranks told an event; AssertionError if they do not in time, or others do too."""
        found = self.wait(event, count, seconds)
        assert len(found) == count, f"{self.events()}\n{self.stderr()}"
        return found

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        """Wait until something holds; AssertionError if it does not in time."""
        assert wait_until(condition, seconds, longest=0.02), f"{self.events()}\n{self.stderr()}"

    def finish(self, seconds: float) -> int:
        """Wait for the job's end and return its status."""
        status = self.process.wait(timeout=seconds)
        self.ended = self.ended or time.time()
        return status

    def close(self) -> None:
        """End what is left of the job."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Job(Started):
    """A job on this machine.

    Args:
        launcher: a key of ``LAUNCHERS``.
        ranks: how many.
        arguments: the script's.
        script: what each rank runs: a file, or the text of one behind IMPORTS.
        is_forked: whether ranks are forked from one process that has imported torch; not for tests in which their
            start, signals or descriptors play a part.
        environment: more variables for the ranks.
    """

    def __init__(
        self,
        launcher: str,
        ranks: int,
        arguments: Sequence[str] = (),
        script: Path | str = HERE / "job.py",
        is_forked: bool = True,
        **environment: str,
    ) -> None:
        folder = Path(tempfile.mkdtemp(prefix="hpcdist-fault-"))
        traces = {"TORCH_FR_DUMP_TEMP_FILE": f"{folder}/trace_"}
        if isinstance(script, str):
            text, script = script, folder / "script.py"
            script.write_text(IMPORTS + text)
        python = forked.python() if is_forked else None
        line = command(launcher, ranks, script, [*arguments], python=python)
        super().__init__(line, settings(**traces, **environment), folder)
        self.launcher = launcher

    def close(self) -> None:
        """End what is left of the job."""
        for pid in {*self.pids().values(), self.process.pid}:
            if pid != self.process.pid or self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        super().close()
