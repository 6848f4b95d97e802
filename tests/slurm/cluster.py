"""A real Slurm cluster of two nodes on one machine.

munged, slurmctld and two ``slurmd -N``, all from Debian's packages, in a temporary folder and on ports of their own,
without an init system and without touching the machine's configuration. The nodes are called 127.0.0.1 and 127.0.0.2:
names that every program can resolve and bind, so that two nodes have two addresses.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.ports import SLURM_PORTS, free_port
from tests.slurm.supervisor import descendants

NODES = ("127.0.0.1", "127.0.0.2")
CPUS_PER_NODE = 4
# Slurm counts files that stand for GPUs: enough to see that a job that asks for GPUs is started as it should be.
GPU_FILES = ("/dev/null", "/dev/zero")
# Debian's plugin opens libpmix.so, the name that only the -dev package has; without it --mpi=pmix does not exist.
PROGRAMS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}
PMIX_LIBRARY = "libpmix-dev"
UNFINISHED = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"}

SLURM_CONF = """\
ClusterName=hpcdist
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={port}
# srun's own listeners: not where a client of an ended server may still try to connect
SrunPortRange={srun_ports}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# Jobs of two clusters on one machine must not share a number: Open MPI names its shared memory after job and step, and
# its processes know each other by them, so that ranks of one job read and wrote the files of another one's.
FirstJobId={first_job}
# A requeued job waits until its old credentials have expired: two minutes, unless told otherwise.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmctldDebug=info
SlurmdSpoolDir={folder}/%n/spool
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdDebug=info
# Differs by node, or two slurmd on one machine collide over PMIx's folder.
TmpFS={folder}/%n/tmp
# No cgroups: a container may have none to give.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/accounting.log
# What a site may have set wrongly for a given MPI: no PMI at all, unless --mpi= says so.
MpiDefault=none
ReturnToService=2
KillWait=5
"""


def why_not() -> str:
    """Say why no cluster can be started here; empty where one can."""
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    if not any(Path("/usr/lib").glob("*/libpmix.so")):
        missing.add(PMIX_LIBRARY)
    if missing:
        return f"no {', '.join(sorted(missing))} here: bash tests/slurm/install.sh (Debian, as root)"
    if os.geteuid() != 0:
        return "slurmd starts jobs as other users, which takes root"
    return ""


def wait_until(condition, timeout=15):
    """Wait until a condition holds; say whether it came to."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@dataclass(frozen=True)
class Job:
    """A job that has left the queue, with what the controller says about it and what it wrote."""

    id: str
    state: str
    exit_status: int
    facts: Mapping[str, str]
    output: str


class Cluster:
    """Two nodes of four CPUs, up between ``__enter__`` and ``__exit__``."""

    def __init__(self) -> None:
        # munged refuses a socket in a folder that others can write to.
        self.folder = Path(tempfile.mkdtemp(prefix="hpcdist-slurm-"))
        self.folder.chmod(0o755)
        self.environment = {
            name: value
            for name, value in os.environ.items()
            # Left-overs of an allocation, or of an mpirun, that the tests run in.
            if not name.startswith(("SLURM_", "SBATCH_", "PMI", "OMPI_COMM", "PRTE_"))
        }
        self.environment["SLURM_CONF"] = str(self.folder / "slurm.conf")
        # the home is on a disk, which both nodes share here, and MUNGE's socket is not where others look for it
        self.environment["HPCDIST_STORE_SECRET"] = secrets.token_hex(16)

    def __enter__(self) -> Cluster:
        """Start the daemons and wait until both nodes are idle."""
        self._configure()
        f = self.folder
        munge = [f"--{name}-file={f}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        daemons = {
            "munged": ["munged", "--foreground", f"--socket={f}/munge/socket", *munge],
            "slurmctld": ["slurmctld", "-D", "-c", "-f", f"{f}/slurm.conf"],
            **{f"slurmd-{n}": ["slurmd", "-D", "-c", "-N", n, "-f", f"{f}/slurm.conf"] for n in NODES},
        }
        self.supervisor = subprocess.Popen(
            [sys.executable, "-S", Path(__file__).with_name("supervisor.py"), f],
            stdin=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.write(json.dumps(daemons) + "\n")
        self.supervisor.stdin.flush()
        deadline = time.monotonic() + 30
        while (states := self._node_states()) != {"idle"}:
            if time.monotonic() > deadline or self.supervisor.poll() is not None:
                logs = "".join(f"--- {p}\n{p.read_text()[-2000:]}" for p in sorted(f.glob("**/*.log")))
                self.__exit__(None, None, None)
                raise RuntimeError(f"the cluster's nodes are {states or 'not there'}, not idle, after 30 s\n{logs}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let go of the supervisor, which ends everything, and wait for it."""
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.close()
        self.supervisor.wait(timeout=30)

    def run(self, *command: str, timeout: float = 30, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands against this cluster."""
        return subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def submit(self, *arguments: str | Path, cwd: Path, **environment: str) -> str:
        """Submit a batch job from the folder ``cwd``, and return its number."""
        result = subprocess.run(
            ["sbatch", "--parsable", *map(str, arguments)],
            env=self.environment | environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert result.returncode == 0, f"sbatch refused the job: {result.stderr}"
        return result.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job as ``squeue`` names it."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").stdout.strip()

    def facts(self, job: str) -> dict[str, str]:
        """Return what ``scontrol show job`` says about a job."""
        shown = self.run("scontrol", "show", "--oneliner", "job", job).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, job: str, timeout: float = 120) -> Job:
        """Wait until a job has left the queue, and return all that is known about it.

        Raises:
            TimeoutError: With the job's output so far, when it is still in the queue; it is cancelled then.
        """
        deadline = time.monotonic() + timeout
        while self.state(job) in UNFINISHED:
            if time.monotonic() > deadline:
                facts = self.facts(job)
                self.run("scancel", job)
                state, reason = facts.get("JobState"), facts.get("Reason")
                raise TimeoutError(
                    f"job {job} is {state} ({reason}) after {timeout} s; its output:\n{self.output(job, facts)}"
                )
            time.sleep(0.1)
        facts = self.facts(job)
        status, number = map(int, facts["ExitCode"].split(":"))
        return Job(job, facts["JobState"], status or (number and 128 + number), facts, self.output(job, facts))

    def output(self, job: str, facts: Mapping[str, str] | None = None) -> str:
        """Read what a job has written so far, on both streams where they differ."""
        known = self.facts(job) if facts is None else facts
        paths = dict.fromkeys(Path(known[name]) for name in ("StdOut", "StdErr") if name in known)
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def processes(self) -> Sequence[str]:
        """List the command lines of the jobs' processes that run on the cluster now."""
        lines = []
        for pid in descendants(self.supervisor.pid):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if line and not line.startswith(("munged", "slurm", ": slurm")):
                lines.append(line)
        return lines

    def ranks(self, script: str, variable: str) -> list[int]:
        """List the processes that run a script of that name with ``NAME=value`` in their environment."""
        found = []
        for pid in descendants(self.supervisor.pid):
            with contextlib.suppress(OSError):
                runs = script.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
                if runs and variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def shared_files(self) -> set[Path]:
        """List the files that processes of the cluster share by mapping: those in /dev/shm and in temporary folders."""
        found = set()
        for pid in descendants(self.supervisor.pid):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    _, access, _, _, _, *path = line.split(maxsplit=5)
                    if access.endswith("s") and path and path[0].startswith(("/dev/shm/", "/tmp/")):
                        found.add(Path(path[0].removesuffix(" (deleted)")))
        return found

    def _configure(self) -> None:
        """Write the key and slurm.conf, and make the folders."""
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for node in NODES:
            for name in ("spool", "tmp"):
                (self.folder / node / name).mkdir(parents=True)
        (self.folder / "state").mkdir()
        hostname = socket.gethostname().partition(".")[0]
        srun = f"{SLURM_PORTS.start}-{SLURM_PORTS.stop - 1}"
        chosen = {"port": free_port(), "first_job": 1 + secrets.randbelow(60_000_000), "srun_ports": srun}
        lines = [SLURM_CONF.format(folder=self.folder, hostname=hostname, **chosen)]
        for node in NODES:
            facts = f"CPUs={CPUS_PER_NODE} Gres=gpu:{len(GPU_FILES)} State=UNKNOWN"
            lines.append(f"NodeName={node} NodeAddr={node} NodeHostname={hostname} Port={free_port()} {facts}")
        lines.append(f"PartitionName=test Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP")
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={name}\n" for name in GPU_FILES))
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _node_states(self) -> set[str]:
        """Return the states that the nodes are in, empty while the controller does not answer."""
        shown = self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
        return set(shown) if len(shown) == len(NODES) else set()
