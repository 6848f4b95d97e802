"""Jobs that are started wrongly, or cancelled, or that outlive their test run."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.programs import environment
from tests.slurm.cluster import NODES, wait_until
from tests.slurm.supervisor import descendants


def test_srun_without_mpi_is_an_error_not_lonely_worlds(cluster, jobs, pythons):
    for name, python in pythons.items():
        result = cluster.run("srun", "--mpi=none", "--ntasks=2", python, str(jobs / "facade_sum.py"), timeout=60)
        assert result.returncode != 0, f"{name}: {result.stdout}"
        assert "world=1" not in result.stdout
        assert "--mpi=pmix for Open MPI, --mpi=pmi2 for MPICH" in result.stderr, f"{name}: {result.stderr}"


STEP_OF_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("hpcdist")
total = torch.ones(3)
dist.all_reduce(total)
print("torch", dist.get_backend(), dist.get_world_size(), total.tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("each_mpi", [pytest.param("Open MPI", marks=pytest.mark.quick), "MPICH"], indirect=True)
def test_torchs_own_init_process_group_under_srun(each_mpi, cluster):
    """No address, no port, and no import of hpcdist."""
    command = ["srun", "--nodes=2", "--ntasks=2", f"--mpi={each_mpi['HPCDIST_MPI']}", each_mpi["HPCDIST_PYTHON"]]
    result = cluster.run(*command, "-c", STEP_OF_TORCH, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["torch hpcdist 2 [2.0, 2.0, 2.0]"] * 2


SITE_SCRIPTS = {
    # NERSC, LUMI: the job script exports torch's variables in each rank
    "exported": 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec "$@"',
    # CSC: torchrun as the step's task on each node; its workers are torchrun's
    "torchrun": 'script=$(mktemp); echo "$3" > $script; "$1" -m torch.distributed.run --nnodes=2 --nproc-per-node=1 '
    "--rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29641 $script; rm $script",
}


@pytest.mark.parametrize("script", SITE_SCRIPTS)
def test_site_scripts_that_export_torchs_variables(script, cluster, openmpi):
    program = STEP_OF_TORCH.replace('"torch",', "type(dist.group.WORLD.backends['cpu']).__name__,")
    command = ["srun", "--nodes=2", "--ntasks=2", f"--mpi={openmpi['HPCDIST_MPI']}", "bash", "-c", SITE_SCRIPTS[script]]
    result = cluster.run(
        *command, "bash", openmpi["HPCDIST_PYTHON"], "-c", program, timeout=100, MASTER_ADDR="nid1", MASTER_PORT="29500"
    )
    assert result.returncode == 0, result.stderr
    kind = {"exported": "MPIBackend", "torchrun": "GlooBackend"}[script]
    assert result.stdout.splitlines() == [f"{kind} hpcdist 2 [2.0, 2.0, 2.0]"] * 2


def test_a_cancelled_job_leaves_nothing_behind(each_mpi, cluster, submit, jobs):
    number = submit("cpu", jobs / "endless.py", options=["--ntasks-per-node=2"], **each_mpi)
    assert wait_until(lambda: "running" in cluster.output(number), timeout=90), cluster.output(number)
    assert any("endless.py" in line for line in cluster.processes())
    shared = cluster.shared_files()
    assert shared, "the ranks of a node share a window at the least"
    assert cluster.run("scancel", number).returncode == 0
    job = cluster.wait(number)
    assert job.state == "CANCELLED"
    assert wait_until(lambda: not cluster.processes()), cluster.processes()
    assert cluster.run("squeue", "--noheader").stdout == ""
    idle = cluster.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").stdout.split()
    assert idle == list(NODES)
    assert wait_until(lambda: not any(path.exists() for path in shared), timeout=5), remove(shared)


def remove(files):
    """Remove what a job left, so that the machine is as it was; say what that is."""
    left = sorted(path for path in files if path.exists())
    for path in left:
        path.unlink()
    return left


def test_the_controller_accounts_for_each_job(cluster, submit, jobs, any_mpi):
    good = cluster.wait(submit("cpu", jobs / "mpi_sum.py", options=["--nodes=2", "--ntasks-per-node=2"], **any_mpi))
    bad = cluster.wait(submit("cpu", jobs / "exit_with.py", "3", options=["--nodes=1", "--ntasks=1"], **any_mpi))
    assert (good.facts["NumNodes"], good.facts["NumTasks"], good.facts["ExitCode"]) == ("2", "4", "0:0")
    assert bad.facts["ExitCode"] == "3:0"
    accounts = (cluster.folder / "accounting.log").read_text()
    for job in (good, bad):
        assert f"JobId={job.id} " in accounts
        assert f"JobState={job.state} " in next(line for line in accounts.splitlines() if f"JobId={job.id} " in line)


def test_a_killed_test_run_takes_its_cluster_with_it():
    script = (
        "import time\n"
        "from tests.slurm.cluster import Cluster\n"
        "with Cluster() as c:\n"
        "    c.run('sbatch', '--wrap=srun sleep 600', '--output=/dev/null')\n"
        "    while not any('sleep 600' in line for line in c.processes()): time.sleep(0.1)\n"
        "    print(c.folder, c.supervisor.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script]
    # munged refuses a socket in a folder that others cannot enter, as that of tests' programs
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment(TMPDIR=tempfile.gettempdir())
    ) as run:
        assert run.stdout is not None
        folder, supervisor = run.stdout.readline().split()
        left = descendants(int(supervisor))
        assert len(left) >= 6, "four daemons, a step and its task at the least"
        run.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not Path(folder).exists())
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in [int(supervisor), *left]))
