"""The shell code of the batch templates, run by bash with an srun and a scontrol of the test's own, without Slurm."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
from pathlib import Path

import pytest

from tests.programs import MPIRUN

SLURM = Path(__file__).parents[2] / "slurm"
SRUN = """#!/usr/bin/env bash
options=()
while [[ "$1" == -* ]]; do options+=("$1"); shift; done
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then
    echo "   PreemptEligibleTime=2026-01-02T03:04:05 PreemptTime=${PREEMPTED:-None}"
    exit
fi
echo requeued
kill -TERM $PPID
"""
PRINTS = 'for each in "$@"; do echo "<$each>"; done\n'


@pytest.fixture
def batch(tmp_path):
    """Run a template with a srun of this text; return its status and what it says."""

    def run(template: str, srun: str, *args: str, python: str = "", **variables: str) -> tuple[int, str]:
        texts = {"srun": SRUN + srun, "scontrol": SCONTROL, "sleep": "#!/bin/sh\n"}
        if python:
            texts["python"] = f"#!/bin/sh\n{python}\n"
            variables["HPCDIST_PYTHON"] = str(tmp_path / "python")
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        given = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCDIST_"))},
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "1",
            **variables,
        }
        done = subprocess.run(
            ["bash", SLURM / f"{template}.sbatch", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=given,
            timeout=30,
        )
        return done.returncode, done.stdout

    return run


def test_ranks_get_what_the_script_sets_and_nothing_of_another_step(batch):
    """sbatch --export=NONE, typed in a shell of srun --pty."""
    left = ["SLURM_STEP_ID", "PMI_RANK", "PMI_SIZE", "PMIX_NAMESPACE", "PMIX_SERVER_URI2"]
    given = dict.fromkeys(left, "1") | {"SLURM_EXPORT_ENV": "NONE", "PMIX_MCA_gds": "hash"}
    status, said = batch("store", "env\n", "train.py", **given)
    assert status == 0, said
    seen = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    assert (seen["HPCDIST_INIT_METHOD"], seen["PMIX_MCA_gds"]) == ("slurm://", "hash")
    assert not seen.keys() & {"SLURM_EXPORT_ENV", *left}


@pytest.mark.parametrize(("given", "runs"), [("1", True), ("0", False), ("", False)])
def test_the_doctor_runs_if_asked_with_the_ranks_threads(batch, monkeypatch, given, runs):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    python = 'echo "$@" of $OMP_NUM_THREADS threads'
    asked = {"HPCDIST_DOCTOR": given, "SLURM_CPUS_PER_TASK": "3"}
    status, said = batch("cpu", PRINTS, "train.py", python=python, **asked)
    assert (status, "-m hpcdist doctor of 3 threads" in said) == (0, runs), said


def test_one_torchrun_a_node_starts_all_ranks_there(batch):
    given = {"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "2", "SLURMD_NODENAME": "n1"}
    status, said = batch("torchrun", 'printf "%s\\n" "${options[@]}" "$@"\n', "train.py", **given)
    assert status == 0, said
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--nproc-per-node=8"} <= set(said.splitlines())


@pytest.mark.parametrize(("template", "expected"), [("gpu", 3), ("requeue", 3), ("torchrun", 12)])
def test_cpus_may_be_counted_by_gpu(batch, template, expected):
    given = {"SLURM_CPUS_PER_GPU": "3", "SLURM_GPUS_ON_NODE": "4", "SLURMD_NODENAME": "n1", "HPCDIST_PYTHON": "python"}
    _, said = batch(template, 'printf "%s\\n" "${options[@]}"\n', "train.py", **given)
    assert f"--cpus-per-task={expected}" in said.splitlines(), said


@pytest.mark.parametrize("given", ["abc", "-1", "08", "1 2"])
def test_a_number_of_restarts_that_is_none_is_named_before_the_job_runs(batch, given):
    status, said = batch("requeue", PRINTS, "train.py", HPCDIST_MAX_RESTARTS=given)
    assert (status, said) == (2, f"error: HPCDIST_MAX_RESTARTS={given}; expected a number\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--lr 0.1 --name 'a first try'", ["<--lr>", "<0.1>", "<--name>", "<a first try>"]),
        ("--name it's --lr 0.1", None),
        ('--name "half', None),
        ("  ", []),
    ],
)
def test_a_line_of_the_sweep_is_taken_whole_or_not_at_all(batch, tmp_path, line, expected):
    (tmp_path / "sweep.txt").write_text(f"--first\n{line}\n--last\n")
    status, said = batch("array", PRINTS, "train.py", HPCDIST_SWEEP="sweep.txt", HPCDIST_PYTHON="python")
    if expected is None:
        assert status == 2
        assert "error: line 1 (from 0) of sweep.txt is not quoted as in a shell" in said
    else:
        assert status == 0, said
        assert [each for each in said.splitlines() if each[0] == "<"] == ["<python>", "<-u>", "<train.py>", *expected]


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ('parser.add_argument("--resume")', {}, ["<--resume>"]),
        ("looks for its checkpoint itself", {}, []),
        ('parser.add_argument("--resume")', {"HPCDIST_RESUME": ""}, []),
        ("its parser is elsewhere", {"HPCDIST_RESUME": "--go-on"}, ["<--go-on>"]),
    ],
)
def test_later_runs_get_the_argument_that_the_script_knows(batch, tmp_path, text, given, expected):
    (tmp_path / "train.py").write_text(text)
    status, said = batch("requeue", PRINTS, "train.py", SLURM_RESTART_COUNT="1", **given)
    assert status == 0, said
    assert said.splitlines()[said.splitlines().index("<train.py>") + 1 : -1] == expected


@pytest.mark.parametrize(("module", "text"), [("hpcdist", "--resume"), ("own.training", "")])
def test_the_script_may_follow_a_module(batch, tmp_path, module, text):
    (tmp_path / "train.py").write_text(text)
    status, said = batch("requeue", PRINTS, "-m", module, "run", "train.py", SLURM_RESTART_COUNT="1")
    assert status == 0, said
    assert said.splitlines()[said.splitlines().index("<train.py>") + 1 : -1] == [f"<{text}>"] * bool(text)
    assert "grep" not in said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"HPCDIST_PYTHON": "no-such-python"}, "error: no program no-such-python here; load its module"),
        ({"HPCDIST_LAUNCHER": "aprun"}, "error: HPCDIST_LAUNCHER=aprun; expected srun or mpirun"),
    ],
)
def test_a_setting_that_elastic_cannot_use_is_named(batch, given, expected):
    status, said = batch("elastic", PRINTS, "train.py", **given)
    assert (status, expected in said) == (2, True), said


@pytest.mark.parametrize("status", [0, 1, 75, 138])
def test_a_warning_does_not_hide_the_status_of_the_step(batch, status):
    """The step ends while bash handles the warning: its wait returns 138, of its own."""
    code, said = batch("requeue", f"trap '' USR1\nkill -USR1 $(ps -o ppid= -p $PPID)\nexit {status}\n", "train.py")
    assert ("requeued" in said) == (status != 1), said
    assert code == (1 if status == 1 else -signal.SIGTERM), said


@pytest.mark.parametrize(("template", "script"), [("requeue", "$(ps -o ppid= -p $PPID)"), ("elastic", "$PPID")])
def test_a_job_that_is_cancelled_leaves_no_file(batch, tmp_path, template, script):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    given = {"TMPDIR": str(temporary), "HPCDIST_PYTHON": "sh"}
    status, said = batch(template, f"kill -TERM {script}\n", "train.py", **given)
    assert status == -signal.SIGTERM, said
    assert [*temporary.iterdir(), *tmp_path.glob(".elastic-*")] == []


@pytest.mark.parametrize("status", [0, 1, 143])
@pytest.mark.parametrize("preempted", ["None", "2026-01-02T03:04:06"])
def test_a_job_that_is_preempted_is_requeued_though_only_its_ranks_are_told(batch, status, preempted):
    code, said = batch("requeue", f"exit {status}\n", "train.py", PREEMPTED=preempted)
    is_requeued = status != 1 and preempted != "None"
    assert ("requeued" in said) == is_requeued, said
    assert code == (-signal.SIGTERM if is_requeued else status), said


@pytest.mark.parametrize(
    ("ranks", "expected"), [("0 0", 0), ("0 137", 0), ("137 0", 0), ("137 137", 1), ("139 134", 1), ("3 0", 3)]
)
def test_a_job_in_which_all_ranks_were_killed_has_failed(batch, tmp_path, ranks, expected):
    srun = f'for each in {ranks}; do RANK_STATUS=$each "$@" || exit; done\n'
    status, said = batch("elastic", srun, "train.py", python='exit "$RANK_STATUS"')
    assert status == expected, said
    assert not list(tmp_path.glob(".elastic-*"))


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")
@pytest.mark.parametrize(("ranks", "expected"), [("0 9", 0), ("9 9", 1), ("3 0", 3)])
def test_so_has_one_under_mpirun(batch, tmp_path, ranks, expected):
    """A status of 9 stands for a rank that is killed."""
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, timeout=30).stdout
    if "Open MPI" not in version or " 4." in version:
        pytest.skip("needs Open MPI 5")
    python = f'set -- {ranks}\nshift "$OMPI_COMM_WORLD_RANK"\n[ "$1" = 9 ] && kill -9 $$\nexit "$1"'
    given = {"SLURM_JOB_NUM_NODES": "1", "HPCDIST_MPIRUN": str(MPIRUN)}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowded = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    status, said = batch("elastic", "", "train.py", python=python, **given, **as_root, **crowded)
    assert status == expected, said
    assert not list(tmp_path.glob(".elastic-*"))


def test_a_rank_that_is_killed_has_been_killed_for_mpirun(batch, tmp_path):
    """Else MPI tells the others nothing: for mpirun a rank that ends with 0 has left the program."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\nshift 4; "$@"; echo "a rank ended with $?"\n')
    mpirun.chmod(0o755)
    given = {"SLURM_JOB_NUM_NODES": "1", "HPCDIST_MPIRUN": str(mpirun)}
    status, said = batch("elastic", "", "train.py", python="kill -9 $$", **given)
    assert (status, "a rank ended with 137" in said) == (1, True), said


@pytest.mark.parametrize("template", ["cpu", "gpu", "hybrid", "array", "requeue", "elastic"])
@pytest.mark.parametrize("given", ["", "pmi2"])
def test_srun_gets_the_mpi_that_was_set_and_no_other(batch, template, given):
    sees = 'echo "options $(tr "\\0" " " < /proc/$$/cmdline)"\n'
    size = {"SLURM_CPUS_PER_TASK": "1", "HPCDIST_PYTHON": "python"}
    _, said = batch(template, sees, "train.py", HPCDIST_MPI=given, **size)
    (options,) = (line for line in said.splitlines() if line.startswith("options"))
    assert [word for word in options.split() if word.startswith("--mpi")] == ([f"--mpi={given}"] if given else [])


def test_the_templates_hold_the_parts_that_are_the_same():
    parts = runpy.run_path(str(SLURM / "parts.py"))
    assert len(parts["templates"]()) == 9
    for path in parts["templates"]():
        assert parts["written"](path) == path.read_text(), "run: python slurm/parts.py"
