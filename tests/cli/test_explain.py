"""The command ``explain``: by name, by a message as a job prints it, without arguments, and with unknown ones."""

import re
from datetime import timedelta

import pytest

import hpcdist
from hpcdist.cli import explain, main
from hpcdist.core.printing import add_hint
from tests.forked import mpirun
from tests.programs import MPIRUN


def test_by_name(capsys):
    assert main.main(["explain", "mpi-not-found"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mpi-not-found\n    mpi4py found no MPI library (…)\n")
    assert "\n\nFix: Load the cluster's MPI module" in shown
    assert "Bring your own MPI (docs/how-to/own-mpi.md)" in " ".join(shown.split())


@pytest.mark.parametrize("name", explain.entries())
def test_an_entry_fits_the_terminal_without_marks(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    entry = explain.entries()[name]
    lines = entry.shown().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("Cause: ") for line in lines)
    assert "**" not in "".join(lines)
    # paragraphs, which are broken again: the lines of a list, a table or a program would run together
    assert not [line for line in entry.text.splitlines() if line.startswith(("- ", "|", "```", "    "))]


def test_a_message_of_a_running_job_names_its_entry(capsys):
    with pytest.raises(hpcdist.DistStoreError) as raised:
        hpcdist.HashStore().wait(["ready"], timedelta(milliseconds=10))
    command = re.search(r"\[python -m hpcdist (explain [\w-]+)\]$", str(raised.value))[1]
    assert main.main(command.split()) == 0
    assert capsys.readouterr().out.startswith("store-timeout\n")


@pytest.mark.parametrize("is_split", [True, False])
def test_by_a_message_that_was_raised(capsys, is_split):
    with pytest.raises(ValueError, match="not been initialized") as raised:
        hpcdist.barrier()
    pasted = f"ValueError: {raised.value}\n"
    assert explain.run(pasted.split() if is_split else [pasted]) == 0
    assert capsys.readouterr().out.startswith("not-initialized\n")


def test_by_a_part_of_a_message(capsys):
    assert explain.run(["group has not been initialized"]) == 0
    assert capsys.readouterr().out.startswith("not-initialized\n")
    assert explain.run(["group has"]) == 1  # too short


def test_of_two_patterns_the_one_that_says_more_wins():
    entries = explain.entries()
    said = "all_reduce on rank 0 of 4 failed: rank 2 of the group died"
    assert explain.best(said, entries).name == "gloo-error"
    said += "; the group takes no more calls, shrink_group makes one without the lost ranks"
    assert explain.best(add_hint(said, "lost-rank"), entries).name == "lost-rank"


@pytest.mark.timeout(30)
def test_a_whole_log_is_searched_in_no_time(capsys):
    """Each part of a pattern fits at many places: expressions tried all of their combinations."""
    log = "tensors by hand: on the rank of a group, which has a call; expected " * 2000
    assert main.main(["explain", log]) == 1
    found = "the ranks of a group of 2 do not make the same call. rank 0: barrier"
    assert main.main(["explain", f"{log}\n{found} {log}"]) == 0
    assert capsys.readouterr().out.startswith("calls-differ")


def test_without_arguments_it_lists_all(capsys):
    assert explain.run([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(explain.entries()) > 40


def test_what_is_not_known_is_1(capsys):
    assert explain.run(["lost-ranks"]) == 1
    assert capsys.readouterr().err == "no entry for 'lost-ranks'; near: lost-rank, group-ranks, wrong-rank\n"
    assert explain.run(["what", "now"]) == 1
    assert "all names: python -m hpcdist explain" in capsys.readouterr().err


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")
def test_a_job_prints_it_once():
    done = mpirun(2, ["-m", "hpcdist", "explain", "mismatch"], timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Detected mismatch between collectives") == 1
