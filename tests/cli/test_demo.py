"""The command ``demo`` on a machine with MPI, on one without, and under a launcher."""

import subprocess
import sys

import pytest

from hpcdist.cli import demo, submit
from hpcdist.cli.doctor import mpi_library
from hpcdist.launch import environment
from tests import forked
from tests.programs import MPIRUN

pytestmark = pytest.mark.timeout(300)
needs_mpirun = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")


@needs_mpirun
def test_it_starts_ranks_by_mpirun():
    called = [sys.executable, "-m", "hpcdist", "demo", "--ranks", "2", "--epochs", "2"]
    done = subprocess.run(called, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout.splitlines()
    assert shown[0].startswith(f"$ {MPIRUN} ")  # though another MPI's may be on the PATH
    assert shown[1].startswith("2 ranks on mpi,")
    assert "after 2 epochs on 2 ranks" in shown[-1]


@needs_mpirun
def test_under_a_launcher_each_process_is_a_rank():
    done = forked.mpirun(2, ["-m", "hpcdist", "demo", "--epochs", "1"], timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks on mpi") == 1


def test_without_mpi_it_starts_them_by_torchrun(monkeypatch, capfd):
    for name in ("launcher", "own_mpirun"):
        monkeypatch.setattr(mpi_library, name, lambda: None)
    assert demo.run(["--ranks", "2", "--epochs", "1"]) == 0
    shown = capfd.readouterr().out
    assert "torch.distributed.run --nproc-per-node=2" in shown
    assert "2 ranks on gloo" in shown


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="2"):
        demo.run([])
    assert "pip install 'hpcdist[demo]'" in capsys.readouterr().err


def test_an_option_of_the_script_is_not_taken_for_the_demos(monkeypatch):
    """``--rank`` is not ``--ranks`` cut short."""
    started = []
    monkeypatch.setattr(environment, "detect", lambda: None)
    monkeypatch.setattr(demo, "command", lambda ranks: [str(ranks)])
    monkeypatch.setattr(demo.subprocess, "Popen", lambda line, **_: started.append(line) or Launcher())
    demo.run(["--rank", "1"])
    assert started == [[str(demo.RANKS), str(submit.CHECKOUT / "jobs" / demo.SCRIPT), "--rank", "1"]]


class Launcher:
    """Is interrupted, with the command, from the terminal, and ends its ranks."""

    def __init__(self, *args, **given):
        self.waits = 0

    def wait(self):
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        return 130


def test_an_interrupt_leaves_the_launcher_the_time_to_clear_up(monkeypatch):
    monkeypatch.setattr(environment, "detect", lambda: None)
    monkeypatch.setattr(demo, "command", lambda ranks: ["mpirun"])
    monkeypatch.setattr(demo.subprocess, "Popen", Launcher)
    assert demo.run([]) == 130
