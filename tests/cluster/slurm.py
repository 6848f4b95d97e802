"""Slurm on a virtual cluster: munged and slurmd on every host, slurmctld on the first."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests import programs
from tests.cluster.hosts import Cluster, Host
from tests.faults.launch import LIBRARY

START_SECONDS = 60.0
# program -> Debian's package; its plugin for PMIx opens libpmix.so, the name that only the -dev package has
PROGRAMS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm"}
PMI = {"openmpi": "pmix", "mpich": "pmi2", "none": "none"}
OWN = Path("/tmp/slurm")  # of each host
DAEMONS = ("munged", "slurm", ": slurm")  # how their command lines begin
UNFINISHED = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"}
# Slurm counts files that stand for GPUs: enough to see that a job that asks for GPUs is started as it should be.
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
# A requeued job waits until its old credentials have expired: two minutes, unless told otherwise. There are no cgroups,
# because a container may have none to give. MpiDefault is what a site may have set wrongly for a given MPI.
CONF = """\
ClusterName=virtual
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={own}/munge.socket,cred_expire=5
StateSaveLocation={own}/state
SlurmctldPidFile={own}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={own}/spool
SlurmdPidFile={own}/slurmd.pid
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS={own}/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
KillWait=5
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Say why Slurm cannot run on virtual hosts here; empty if it can."""
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    if not any(Path("/usr/lib").glob("*/libpmix.so")):
        missing.add("libpmix-dev")
    return f"Slurm is not installed: apt-get install {' '.join(sorted(missing))}" if missing else ""


def wait_until(condition: Callable[[], object], seconds: float = 15) -> bool:
    """Wait until a condition holds; say whether it came to."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Job(NamedTuple):
    """A job that has left the queue, with what the controller says about it and what it wrote."""

    id: str
    state: str
    exit_status: int
    facts: dict[str, str]
    output: str


class Slurm:
    """Slurm on the first hosts of a cluster, from ``__enter__`` until the cluster is reset.

    Args:
        cluster: the hosts.
        count: how many of them.
    """

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.hosts: list[Host] = cluster.hosts[:count]
        self.shared = cluster.shared
        self.folder = cluster.shared / "slurm"
        self.environment = {
            name: value
            for name, value in programs.environment().items()
            if not name.startswith(("SLURM_", "SBATCH_")) and name not in ("HOSTNAME", "TMPDIR")
        }
        self.environment |= {
            "HPCDIST_STORE_SECRET": secrets.token_hex(16),  # MUNGE's socket is not where others look for it
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PRTE_MCA_hwloc_default_binding_policy": "none",  # all hosts are this machine, which may have fewer cores
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "FI_PROVIDER": "tcp",
            # By UCX, MPICH 5.0.2 publishes 4 KiB of memory that it has not written, in pieces whose length depends on
            # what is in it; those above 1 KiB break Slurm 22.05's pmi2.
            "MPIR_CVAR_CH4_NETMOD": "ofi",
        }

    def __enter__(self) -> Slurm:
        self.folder.mkdir(mode=0o755, exist_ok=True)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        nodes = "\n".join(
            f"NodeName={each.name} NodeAddr={each.address} CPUs=4 Gres=gpu:2 State=UNKNOWN" for each in self.hosts
        )
        conf = CONF.format(first=self.hosts[0], own=OWN, folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(GPUS)
        munge = " ".join(f"--{name}-file={OWN}/munge.{name}" for name in ("pid", "log", "seed"))
        for host in self.hosts:
            self._start(
                host,
                f"rm -rf {OWN}; mkdir -p {OWN}/state {OWN}/spool {OWN}/tmp; chmod -R 755 {OWN}; "
                f"munged --key-file={key} --socket={OWN}/munge.socket {munge}",
            )
        self._start(self.hosts[0], "slurmctld -c")
        for host in self.hosts:
            self._start(host, f"slurmd -c -N {host.name}")
        if not wait_until(lambda: self.node_states() == ["idle"] * len(self.hosts), START_SECONDS):
            logs = "".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
            raise RuntimeError(
                f"Slurm's nodes are {self.node_states() or 'not there'}, not idle, after {START_SECONDS} s\n{logs}"
            )
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.end_processes()

    def _start(self, host: Host, command: str) -> None:
        done = host.run(["bash", "-c", command], environment=self.environment)
        if done.returncode:
            raise RuntimeError(f"{command} on {host.name}: {done.stderr or done.stdout}")

    # -- commands ------------------------------------------------------------------------------------

    def run(
        self, *words: str | Path, seconds: float = 60, folder: Path = programs.ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands on the first host, in a folder."""
        return self.hosts[0].run([str(each) for each in words], seconds, self.environment | environment, folder)

    def srun(self, *program: str, ranks_each: int = 2, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """Run Python with some arguments on ranks of every host."""
        count = len(self.hosts)
        options = [f"--nodes={count}", f"--ntasks-per-node={ranks_each}", f"--mpi={PMI[LIBRARY]}"]
        return self.run("srun", *options, sys.executable, *program, seconds=seconds)

    def submit(self, *arguments: str | Path, folder: Path, **environment: str) -> str:
        """Submit a batch job from a folder, and return its number."""
        done = self.run("sbatch", "--parsable", *arguments, folder=folder, **environment)
        assert done.returncode == 0, f"sbatch refused the job: {done.stderr}"
        return done.stdout.strip()

    # -- what there is -------------------------------------------------------------------------------

    def node_states(self) -> list[str]:
        """Return the states that the nodes are in, none while the controller does not answer."""
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()

    def state(self, job: str) -> str:
        """Return the state of a job as ``squeue`` names it."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").stdout.strip()

    def facts(self, job: str) -> dict[str, str]:
        """Return what ``scontrol show job`` says about a job."""
        shown = self.run("scontrol", "show", "--oneliner", "job", job).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, job: str, seconds: float = 120) -> Job:
        """Wait until a job has left the queue, and return all that is known about it.

        Raises:
            TimeoutError: With the job's output so far, when it is still in the queue; it is cancelled then.
        """
        is_over = wait_until(lambda: self.state(job) not in UNFINISHED, seconds)
        facts = self.facts(job)
        if not is_over:
            self.run("scancel", job)
            state, reason = facts.get("JobState"), facts.get("Reason")
            raise TimeoutError(
                f"job {job} is {state} ({reason}) after {seconds} s; its output:\n{self.output(job, facts)}"
            )
        status, number = map(int, facts["ExitCode"].split(":"))
        return Job(job, facts["JobState"], status or (number and 128 + number), facts, self.output(job, facts))

    def output(self, job: str, facts: dict[str, str] | None = None) -> str:
        """Read what a job has written so far, on both streams where they differ."""
        known = self.facts(job) if facts is None else facts
        paths = dict.fromkeys(Path(known[name]) for name in ("StdOut", "StdErr") if name in known)
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def processes(self) -> list[str]:
        """Return the command lines of the jobs' processes that run now."""
        texts = [text for host in self.hosts for text in host.processes().values()]
        return [text for text in texts if not text.startswith(DAEMONS)]
