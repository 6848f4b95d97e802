"""Jobs that are started wrongly, as sites start them, or cancelled."""

import pytest

from tests.cluster.slurm import wait_until


def test_srun_without_mpi_is_an_error_not_lonely_worlds(cluster, jobs, pythons):
    for name, python in pythons.items():
        result = cluster.run("srun", "--mpi=none", "--ntasks=2", python, str(jobs / "facade_sum.py"), seconds=60)
        assert result.returncode != 0, f"{name}: {result.stdout}"
        assert "world=1" not in result.stdout
        assert "--mpi=pmix for Open MPI, --mpi=pmi2 for MPICH" in result.stderr, f"{name}: {result.stderr}"


STEP_OF_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("hpcdist")
total = torch.ones(3)
dist.all_reduce(total)
print("torch", dist.get_backend(), dist.get_world_size(), total.tolist())
"""
STEP_TO_ITS_END = f"{STEP_OF_TORCH}dist.destroy_process_group()\n"


@pytest.mark.parametrize("each_mpi", [pytest.param("Open MPI", marks=pytest.mark.quick), "MPICH"], indirect=True)
@pytest.mark.parametrize("program", [STEP_OF_TORCH, STEP_TO_ITS_END], ids=["left open", "closed"])
def test_torchs_own_init_process_group_under_srun(each_mpi, program, cluster):
    """No address, no port, and no import of hpcdist."""
    command = ["srun", "--nodes=2", "--ntasks=2", f"--mpi={each_mpi['HPCDIST_MPI']}", each_mpi["HPCDIST_PYTHON"]]
    result = cluster.run(*command, "-c", program, seconds=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["torch hpcdist 2 [2.0, 2.0, 2.0]"] * 2


SITE_SCRIPTS = {
    # NERSC, LUMI: the job script exports torch's variables in each rank
    "exported": 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec "$@"',
    # CSC: torchrun as the step's task on each node; its workers are torchrun's
    "torchrun": 'script=$(mktemp); echo "$3" > $script; "$1" -m torch.distributed.run --nnodes=2 --nproc-per-node=1 '
    "--rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d --rdzv-endpoint=n1:29641 $script; rm $script",
}


@pytest.mark.parametrize("script", SITE_SCRIPTS)
def test_site_scripts_that_export_torchs_variables(script, cluster, openmpi):
    program = STEP_TO_ITS_END.replace('"torch",', "type(dist.group.WORLD.backends['cpu']).__name__,")
    command = ["srun", "--nodes=2", "--ntasks=2", f"--mpi={openmpi['HPCDIST_MPI']}", "bash", "-c", SITE_SCRIPTS[script]]
    result = cluster.run(
        *command, "bash", openmpi["HPCDIST_PYTHON"], "-c", program, seconds=100, MASTER_ADDR="nid1", MASTER_PORT="29500"
    )
    assert result.returncode == 0, result.stderr
    kind = {"exported": "MPIBackend", "torchrun": "GlooBackend"}[script]
    assert result.stdout.splitlines() == [f"{kind} hpcdist 2 [2.0, 2.0, 2.0]"] * 2


BY_HAND = """
import os, torch, hpcdist as dist
given = {"rank": int(os.environ["SLURM_PROCID"]), "world_size": int(os.environ["SLURM_NTASKS"])}
for url in (None, "tcp://n1:29642"):
    dist.init_process_group(init_method=url, **given)
    dist.all_reduce(total := torch.ones(1))
    print(type(dist.group.WORLD.backends["cpu"]).__name__, dist.get_rank() == given["rank"], int(total))
    dist.destroy_process_group()
"""


def test_a_heterogeneous_job_whose_script_takes_slurms_numbers(each_mpi, cluster):
    """One world over both parts, also for a script that gives an address (IDRIS, the Alliance)."""
    parts = ["salloc", "--nodes=1", "--ntasks=1", ":", "--nodes=1", "--ntasks=2"]
    command = ["srun", "--het-group=0,1", f"--mpi={each_mpi['HPCDIST_MPI']}", each_mpi["HPCDIST_PYTHON"], "-c", BY_HAND]
    result = cluster.run(*parts, *command, seconds=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["MPIBackend True 3"] * 6


def test_one_process_in_an_allocation_of_several_tasks_says_so(any_mpi, cluster):
    program = "import hpcdist as dist; dist.init_process_group(); print(dist.get_world_size())"
    result = cluster.run("salloc", "--ntasks=4", any_mpi["HPCDIST_PYTHON"], "-c", program)
    assert result.stdout == "1\n"
    assert "world of its own in a job of 4 tasks (SLURM_NTASKS)" in result.stderr
    result = cluster.run("salloc", "--ntasks=4", any_mpi["HPCDIST_PYTHON"], "-c", program, WORLD_SIZE="4")
    assert result.returncode == 1
    said = (
        "environment variable RANK expected, but not set; no launcher started this process: start the ranks with srun"
    )
    assert said in result.stderr
    result = cluster.run("salloc", "--ntasks=4", any_mpi["HPCDIST_PYTHON"], "-c", STEP_OF_TORCH)
    assert said in result.stderr


# in double quotes the job script's own numbers: every rank is told to be rank 0
QUOTED = 'export RANK=0 WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29500; "$@"'


@pytest.mark.parametrize(
    "way", [["-c", STEP_OF_TORCH], ["-m", "hpcdist", "run", "tests/slurm/jobs/facade_sum.py"]], ids=["c10d", "run"]
)
def test_ranks_that_raise_before_mpi_starts_end_the_job(each_mpi, way, cluster):
    """Rank 0's numbers are right: it would wait for the others in MPI_Init, as srun does not end the step by itself."""
    command = ["srun", "--nodes=2", "--ntasks=4", "--kill-on-bad-exit=0", f"--mpi={each_mpi['HPCDIST_MPI']}"]
    result = cluster.run(*command, "bash", "-c", QUOTED, "bash", each_mpi["HPCDIST_PYTHON"], *way, seconds=100)
    assert result.returncode != 0
    assert "contradictory: srun says rank" in result.stderr
    assert "exits before MPI has started, and the job is aborted" in result.stderr


RANK_WITH_A_CHILD = """
import subprocess, sys, hpcdist as dist
program = "import hpcdist; hpcdist.is_initialized(); raise KeyError('of the child')"
child = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
assert "KeyError" in child.stderr and "aborted" not in child.stderr
dist.init_process_group()
print(dist.get_world_size())
dist.destroy_process_group()
"""


WORLDS_OF_ONE = """
import os, time, hpcdist as dist
dist.init_process_group("loopback", world_size=1)
assert os.environ["SLURM_PROCID"] == "1", "a task by itself"
time.sleep(3)
print("ran to its end")
"""


def test_an_exception_for_which_nobody_waits_does_not_end_the_job(each_mpi, cluster):
    """Of a process that a rank has started, and of one of several tasks that each have a world of their own."""
    command = ["srun", "--ntasks=2", f"--mpi={each_mpi['HPCDIST_MPI']}", each_mpi["HPCDIST_PYTHON"], "-c"]
    result = cluster.run(*command, RANK_WITH_A_CHILD, seconds=100)
    assert (result.returncode, result.stdout) == (0, "2\n2\n"), result.stderr
    result = cluster.run(*command, WORLDS_OF_ONE, seconds=100)
    assert (result.returncode, result.stdout) == (1, "ran to its end\n"), result.stderr


def mapped(host):
    """Return the files in a host's /dev/shm and /tmp that processes share by mapping them."""
    command = r"sed -nE 's:^\S+ ..[x-]s .* (/(dev/shm|tmp)/\S+).*:\1:p' /proc/[0-9]*/maps 2> /dev/null"
    return host.run(["bash", "-c", command]).stdout.split()


def test_a_cancelled_job_leaves_nothing_behind(each_mpi, cluster, submit, jobs):
    number = submit("cpu", jobs / "endless.py", options=["--ntasks-per-node=2"], **each_mpi)
    assert wait_until(lambda: "running" in cluster.output(number), seconds=90), cluster.output(number)
    assert any("endless.py" in line for line in cluster.processes())
    shared = {host: mapped(host) for host in cluster.hosts}
    assert all(shared.values()), "the ranks of a node share a window at the least"
    assert cluster.run("scancel", number).returncode == 0
    job = cluster.wait(number)
    assert job.state == "CANCELLED"
    assert wait_until(lambda: not cluster.processes()), cluster.processes()
    assert cluster.run("squeue", "--noheader").stdout == ""
    assert cluster.node_states() == ["idle", "idle"]
    assert wait_until(lambda: not any(host.run(["ls", *shared[host]]).stdout for host in shared), 5), shared


ONE_OF = """
import hpcdist as dist
dist.init_process_group()
print("world", dist.get_world_size())
"""
AGAIN = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], close_fds=%s).returncode)"


def test_one_program_after_another_in_the_shell_of_a_step(each_mpi, cluster):
    """`srun --pty bash`: the first ends MPICH's connection to Slurm, Python does not pass it on to the third."""
    shell = 'set -e; "$@"; "$@"; "$1" -c "$AGAIN" "${@:2}"'
    command = ["srun", f"--mpi={each_mpi['HPCDIST_MPI']}", "bash", "-c", shell, "bash", each_mpi["HPCDIST_PYTHON"]]
    result = cluster.run(*command, "-c", ONE_OF, seconds=100, AGAIN=AGAIN % True)
    assert (result.returncode, result.stdout) == (0, "world 1\n" * 3), result.stderr


@pytest.mark.parametrize("close", [True, False])
def test_ranks_of_mpich_that_a_python_program_starts(mpich, close, cluster):
    command = ["srun", "--ntasks=2", "--mpi=pmi2", mpich["HPCDIST_PYTHON"], "-c", AGAIN % close, "-c", ONE_OF]
    result = cluster.run(*command, seconds=100)
    if close:
        assert result.returncode == 1
        assert "no open connection to it (PMI_FD=" in result.stderr
    else:
        assert (result.returncode, result.stdout) == (0, "world 2\n" * 2), result.stderr


def test_a_shell_kept_from_a_step_that_has_ended(each_mpi, cluster, tmp_path):
    """tmux, or a terminal of an editor: a program by itself is a world of one, and ends well."""
    kept = tmp_path / "environment"
    start = ["srun", f"--mpi={each_mpi['HPCDIST_MPI']}", "bash", "-c"]
    assert cluster.run(*start, f"export -p > {kept}").returncode == 0
    result = cluster.run("bash", "-c", f'. {kept}; exec "$@"', "bash", each_mpi["HPCDIST_PYTHON"], "-c", ONE_OF)
    assert (result.returncode, result.stdout) == (0, "world 1\n"), result.stderr
