"""The command ``submit``, on stand-ins of the batch systems' commands, with the real mpiexec behind them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.cli import slurm, submit
from tests.programs import LIBRARY, MPIRUN, environment

STAND_INS = Path(__file__).parent / "batch_systems.py"
COMMANDS = {"pbs": "qsub", "lsf": "bsub", "flux": "flux"}
OUTPUT = {"pbs": "hpcdist.o1234", "lsf": "hpcdist-1234.out", "flux": "hpcdist-1234.out"}
JOB = """
import os, sys
from mpi4py import MPI

total = MPI.COMM_WORLD.allreduce(1)
if MPI.COMM_WORLD.rank == 0:
    print("sum", total, os.environ["OMP_NUM_THREADS"], os.getcwd(), sys.argv[1:])
"""
THROUGH_HPCDIST = """
import sys
import torch
import hpcdist as dist
from hpcdist.launch import environment

dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("sum", int(total), environment.detect().name, sys.argv[1:])
dist.destroy_process_group()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to submit from, with ``job.py`` in it and no batch system on the PATH."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, value in environment(PATH=f"{tmp_path}/bin:/usr/bin:/bin").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")  # on any machine
    monkeypatch.setenv("PRTE_MCA_hwloc_default_binding_policy", "none")
    monkeypatch.setattr(shutil, "which", lambda name, which=shutil.which: which(name, path=str(tmp_path / "bin")))
    return tmp_path


@pytest.fixture
def install(here):
    """Put the command of a batch system on the PATH."""

    def write(system):
        file = here / "bin" / COMMANDS[system]
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_INS} {COMMANDS[system]} "$@"\n')
        file.chmod(0o755)

    return write


needs_mpirun = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")


def mpi_of(system):
    return ["--mpi", "simple" if system == "flux" else {"openmpi": "openmpi", "mpich": "hydra"}[LIBRARY]]


@needs_mpirun
@pytest.mark.parametrize("system", COMMANDS)
def test_a_job_runs_on_the_batch_system_that_is_here(system, here, install, capfd):
    install(system)
    size = ["--nodes", "2", "--ranks-per-node", "2", "--time", "01:30:01"]
    assert submit.run([*size, *mpi_of(system), "job.py", "--epochs", "a b"]) == 0
    assert "1234" in capfd.readouterr().out
    seen = (here / OUTPUT[system]).read_text()
    assert f"sum 4 1 {here} ['--epochs', 'a b']\n" in seen, seen
    assert re.search(r"^job .*1234.* 4 ranks, .* started 20", seen), seen
    assert seen.endswith("with status 0\n"), seen


@needs_mpirun
def test_hpcdist_knows_the_ranks_of_flux_run(here, install):
    install("flux")
    (here / "job.py").write_text(THROUGH_HPCDIST)
    assert submit.run(["--ranks-per-node", "2", *mpi_of("flux"), "job.py", "x"]) == 0
    launcher = {"openmpi": "mpirun (Open MPI)", "mpich": "flux run"}[LIBRARY]  # the stand-in starts ranks by mpiexec
    assert f"sum 2 {launcher} ['x']\n" in (seen := (here / OUTPUT["flux"]).read_text()), seen


@needs_mpirun
def test_a_job_that_fails_says_so(here, install):
    install("lsf")
    (here / "job.py").write_text("raise SystemExit(7)")
    assert submit.run(["--ranks-per-node", "1", *mpi_of("lsf"), "job.py"]) == 0
    assert (here / OUTPUT["lsf"]).read_text().endswith("with status 7\n")


def test_the_templates_can_be_submitted_by_hand(here, install):
    for system in ("pbs", "lsf"):
        install(system)
    (here / "bin" / "python").symlink_to(sys.executable)
    (here / "bin" / "mpiexec").write_text('#!/bin/sh\necho "$(basename "$0") $*"\n')
    (here / "bin" / "mpiexec").chmod(0o755)
    pbs = ["qsub", "-v", "HPCDIST_SCRIPT=job.py --lr 0.1,HPCDIST_MPI=pals", slurm.CHECKOUT / "job.pbs"]
    variables = {"PATH": f"{here}/bin:/usr/bin:/bin", "BATCH_HOSTS": "node1,node2"}
    subprocess.run(pbs, env=variables, cwd=here, check=True, timeout=60)
    seen = (here / OUTPUT["pbs"]).read_text()
    assert "on 2 nodes, 8 ranks, mpiexec of pals" in seen
    assert "\nmpiexec -n 8 --ppn 4 --depth 1 --cpu-bind depth python -u job.py --lr 0.1\n" in seen
    variables |= {"HPCDIST_SCRIPT": "job.py", "HPCDIST_THREADS_PER_RANK": "2"}
    with open(slurm.CHECKOUT / "job.lsf") as script:
        subprocess.run(["bsub"], stdin=script, env=variables, cwd=here, check=True, timeout=60)
    seen = (here / OUTPUT["lsf"]).read_text()
    assert f"mpiexec -n 8 --hostfile {here}/hosts.1234 --map-by slot:PE=2 python -u job.py\n" in seen


def script_of(capsys, *arguments):
    assert submit.run(["--dry-run", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("system", COMMANDS)
def test_a_template_differs_from_its_job_script_in_what_was_asked_for(system, capsys):
    sizes = ["--nodes", "2", "--ranks-per-node", "4"]
    before = [line for line in slurm.template(f"job.{system}").splitlines() if not line.startswith("# submit:")]
    after = script_of(capsys, "--system", system, *sizes, "train.py").splitlines()
    new = [line for line in after if line not in before]
    settings = {
        "pbs": [],
        "lsf": ["HPCDIST_THREADS_PER_RANK=1"],
        "flux": ["HPCDIST_RANKS_PER_NODE=4", "HPCDIST_THREADS_PER_RANK=1"],
    }
    assert new == [f"HPCDIST_PYTHON={sys.executable}", *settings[system], 'set -- train.py "$@"']


@pytest.mark.parametrize("system", submit.SYSTEMS)
def test_every_option_reaches_the_job_script(system, capsys, tmp_path):
    given = ["--nodes", "3", "--gpus-per-node", "2", "--threads-per-rank", "5", "--time", "01:00:01"]
    given += ["--queue", "long", "--account", "me", "--name", "first", "--modules", "a b", "--mpi", "own"]
    text = script_of(capsys, "--system", system, *given, "train.py")
    lines = {
        "slurm": "--nodes=3 --ntasks-per-node=2 --cpus-per-task=5 --gpus-per-node=2 --time=01:00:01 --partition=long "
        "--account=me --job-name=first",
        "pbs": "select=3:ncpus=10:mpiprocs=2:ompthreads=5:ngpus=2|walltime=01:00:01|-q long|-A me|-N first",
        "flux": "--nodes=3 --time-limit=61m --queue=long --bank=me --job-name=first HPCDIST_RANKS_PER_NODE=2",
        "lsf": 'n 6|"span[ptile=2] affinity[core(5)]"|-W 61|-gpu "num=2/host:mode=shared"|-q long|-P me|-J first',
    }[system]
    active = [line for line in text.splitlines() if not re.match("##|# unused", line)]
    for part in lines.split("|") if "|" in lines else lines.split():
        assert sum(line.endswith(part) for line in active) == 1, part
    assert "HPCDIST_MODULES='a b'\n" in text
    assert "HPCDIST_MPI=own\n" in text
    if checker := shutil.which("shellcheck"):
        done = subprocess.run([checker, "-"], input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


def test_a_part_whose_option_was_not_given_is_left_out(capsys):
    text = script_of(capsys, "--system", "pbs", "--nodes", "3", "train.py")
    assert "\n#PBS -l select=3:ncpus=4:mpiprocs=4:ompthreads=1\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job.py"], "no batch system here (looked for sbatch, qsub, flux, bsub)"),
        (["--system", "sge", "job.py"], "invalid choice: 'sge'"),
        (["--system", "pbs", "--time", "90", "job.py"], "--time is '90'; expected HH:MM:SS"),
        (["--system", "pbs", "--nodes", "0", "job.py"], "nodes is 0; expected 1 or more"),
        (["--system", "pbs", "--queue", "a b", "job.py"], "--queue 'a b' cannot be written to a job script"),
        (["--system", "flux"], "required: script"),
    ],
)
def test_a_wrong_call_says_what_is_expected(arguments, message, here, capsys):
    with pytest.raises(SystemExit, match="2"):
        submit.run(arguments)
    assert message in capsys.readouterr().err


def test_several_batch_systems_are_a_choice_to_make(here, install, capsys):
    for system in COMMANDS:
        install(system)
    with pytest.raises(SystemExit, match="2"):
        submit.run(["job.py"])
    assert "several batch systems here (pbs, flux, lsf); choose one with --system" in capsys.readouterr().err
    for system in ("pbs", "lsf"):
        (here / "bin" / COMMANDS[system]).unlink()
    assert submit.system_here() == "flux"


@pytest.mark.parametrize(
    ("system", "line", "message"),
    [
        ("pbs", "#PBS --nodes=2", "option --nodes not recognized"),
        ("pbs", "#PBS -l select=1:ncpus=1:mpiprocs=1:ompthreads=1:gpus=1", "Unknown resource gpus"),
        ("lsf", "#BSUB --nodes 2", "unrecognized arguments"),
        ("flux", "# flux: --ntasks-per-node=2", "unrecognized arguments"),
    ],
)
def test_the_stand_ins_refuse_what_the_real_commands_refuse(system, line, message, here, install):
    install(system)
    command = {"flux": ["flux", "batch"]}.get(system, [COMMANDS[system]])
    text = slurm.template(f"job.{system}").replace("\n# ---- what", f"\n{line}\n# ---- what")
    done = subprocess.run(
        [here / "bin" / command[0], *command[1:]], input=text, capture_output=True, text=True, timeout=60, cwd=here
    )
    assert done.returncode != 0
    assert message in done.stderr
