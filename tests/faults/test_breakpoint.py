"""One rank's pdb, on the terminal that mpirun was started from, while the others wait."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import time
from typing import Any

import pytest

from tests import forked
from tests.faults.launch import FIRST, HERE, LIBRARY, MPIRUN, PLAIN, START_SECONDS, command, settings
from tests.programs import is_alive

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
TIMEOUT = 1.0  # of the job's group
PROMPT = "(Pdb of rank {})"


class Terminal:
    """A job that was started from a terminal."""

    def __init__(self, launcher: str, rank: int, kind: str, options: list[str] | None = None) -> None:
        line = command(launcher, 2, HERE / "debugged_job.py", [str(rank), kind], options, forked.python())
        self.text = ""
        self.pid, self.side = pty.fork()
        if self.pid == 0:
            os.execve(MPIRUN, line, settings())

    def read(self, seconds: float) -> bool:
        """Take in what is shown within a time; False where the job has ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.side], [], [], left)[0]:
                try:
                    data = os.read(self.side, 4096)
                except OSError:
                    return False  # Linux says so where nobody holds the other side
                if not data:
                    return False
                self.text += data.decode(errors="replace").replace("\r", "")
        return True

    def wait(self, text: str, count: int = 1, seconds: float = START_SECONDS) -> None:
        """Wait until a text was shown so many times."""
        deadline = time.monotonic() + seconds
        while self.text.count(text) < count:
            is_there = self.read(0.1)
            assert self.text.count(text) >= count or (is_there and time.monotonic() < deadline), self.text

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self.side, f"{line}\n".encode())

    def finish(self, seconds: float) -> int:
        """Wait for the end and return the status."""
        deadline = time.monotonic() + seconds
        while self.read(0.1):
            assert time.monotonic() < deadline, self.text
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what the ranks have told."""
        found = [json.loads(each) for each in re.findall(r'\{"rank".*?\}', self.text)]
        return [each for each in found if each["event"] == name]

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in {self.pid, *(each["pid"] for each in [*self.events("ready"), *self.events("step")])}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        os.close(self.side)


@pytest.mark.parametrize("launcher", FIRST)
def test_one_rank_is_looked_at_and_stepped_on_while_the_other_waits_past_its_timeout(launcher: str) -> None:
    with Terminal(launcher, 0, "once") as job:
        job.wait(PROMPT.format(0))
        job.read(3 * TIMEOUT)
        job.type("p secret + 1")
        job.wait(PROMPT.format(0), 2)
        assert re.search(r"^41$", job.text, re.MULTILINE), job.text
        job.type("n")
        job.wait("-> secret += 100")
        job.type("n")
        job.wait("-> tell(")
        job.type("secret = 7")
        job.type("c")
        assert job.finish(30) == 0, job.text
        assert {each["rank"]: each["secret"] for each in job.events("next")} == {0: 7, 1: 141}
        assert len(job.events("over")) == 2
        assert "has not ended" not in job.text  # no report of the watchdog


@pytest.mark.parametrize("launcher", FIRST)
def test_to_quit_ends_the_job(launcher: str) -> None:
    with Terminal(launcher, 0, "once") as job:
        job.wait(PROMPT.format(0))
        job.type("q")
        assert job.finish(30) != 0
        assert "[rank 0 of 2] uncaught exception" in job.text
        assert "BdbQuit" in job.text
        assert not job.events("over")


@pytest.mark.parametrize("launcher", FIRST)
def test_skip_passes_the_first_rounds(launcher: str) -> None:
    with Terminal(launcher, 0, "skip") as job:
        for round_ in (3, 4):
            job.wait(PROMPT.format(0), round_ - 2)
            assert [each["step"] for each in job.events("step") if each["rank"] == 0] == list(range(round_))
            job.type("c")
        assert job.finish(30) == 0, job.text


@pytest.mark.parametrize("launcher", PLAIN)
def test_the_others_time_out_once_the_time_for_it_is_over(launcher: str) -> None:
    with Terminal(launcher, 0, "long") as job:
        job.wait(PROMPT.format(0))
        start = time.time()
        assert job.finish(30) != 0
        assert 4 - 1 <= time.time() - start < 4 + 10  # pdb opened just before it was seen
        assert "barrier #1" in job.text
        assert "rank 0" in job.text


@pytest.mark.skipif(LIBRARY != "openmpi", reason="MPICH's mpirun forwards input to rank 0 alone")
@pytest.mark.parametrize("options", [["--stdin", "1"], []], ids=["with --stdin", "without"])
def test_another_rank_is_looked_at_where_the_launcher_forwards_to_it(options: list[str]) -> None:
    with Terminal(FIRST[0], 1, "once", options) as job:
        if options:
            job.wait(PROMPT.format(1))
            job.type("p secret + 1")
            job.wait(PROMPT.format(1), 2)
            assert re.search(r"^42$", job.text, re.MULTILINE), job.text
            job.type("c")
        assert job.finish(START_SECONDS) == 0, job.text
        assert ("rank 1 has no input" in job.text) is (not options)
        assert "mpirun --stdin 1" in job.text
        assert len(job.events("over")) == 2


def test_no_rank_of_that_number_is_an_error() -> None:
    import hpcdist as dist

    dist.init_process_group("loopback")
    try:
        with pytest.raises(ValueError, match="breakpoint on rank 3"):
            dist.breakpoint(3)
    finally:
        dist.destroy_process_group()
