"""Slurm on a virtual cluster: munged and slurmd on every host, slurmctld on the first."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests import programs
from tests.cluster.hosts import Cluster, Host
from tests.faults.launch import LIBRARY

START_SECONDS = 60.0
# program -> Debian's package; its plugin for PMIx opens libpmix.so, the name that only the -dev package has
PROGRAMS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm"}
PMI = {"openmpi": "pmix", "mpich": "pmi2", "none": "none"}
OWN = Path("/tmp/slurm")  # of each host
CONF = """\
ClusterName=virtual
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={own}/munge.socket
StateSaveLocation={own}/state
SlurmctldPidFile={own}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={own}/spool
SlurmdPidFile={own}/slurmd.pid
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS=/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
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


class Slurm:
    """Slurm on the first hosts of a cluster, from ``__enter__`` until the cluster is reset.

    Args:
        cluster: the hosts.
        count: how many of them.
    """

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.hosts: list[Host] = cluster.hosts[:count]
        self.folder = cluster.shared / "slurm"
        self.environment = {
            name: value
            for name, value in programs.environment().items()
            if not name.startswith(("SLURM_", "SBATCH_")) and name not in ("HOSTNAME", "TMPDIR")
        }
        self.environment |= {
            "HPCDIST_STORE_SECRET": secrets.token_hex(16),  # MUNGE's socket is not where others look for it
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "FI_PROVIDER": "tcp",
            "MPIR_CVAR_CH4_NETMOD": "ofi",  # over UCX, MPICH's addresses break Slurm 22.05's pmi2
        }

    def __enter__(self) -> Slurm:
        self.folder.mkdir(mode=0o755, exist_ok=True)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        nodes = "\n".join(f"NodeName={each.name} NodeAddr={each.address} CPUs=4 State=UNKNOWN" for each in self.hosts)
        conf = CONF.format(first=self.hosts[0], own=OWN, folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(conf)
        munge = " ".join(f"--{name}-file={OWN}/munge.{name}" for name in ("pid", "log", "seed"))
        for host in self.hosts:
            self._start(
                host,
                f"rm -rf {OWN} /tmp/spmix_*; mkdir -p {OWN}/state {OWN}/spool; chmod -R 755 {OWN}; "
                f"munged --key-file={key} --socket={OWN}/munge.socket {munge}",
            )
        self._start(self.hosts[0], "slurmctld -c")
        for host in self.hosts:
            self._start(host, f"slurmd -c -N {host.name}")
        deadline = time.monotonic() + START_SECONDS
        while (states := self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()) != ["idle"] * len(
            self.hosts
        ):
            if time.monotonic() > deadline:
                logs = "".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
                raise RuntimeError(
                    f"Slurm's nodes are {states or 'not there'}, not idle, after {START_SECONDS} s\n{logs}"
                )
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.end_processes()

    def _start(self, host: Host, command: str) -> None:
        done = host.run(["bash", "-c", command], environment=self.environment)
        if done.returncode:
            raise RuntimeError(f"{command} on {host.name}: {done.stderr or done.stdout}")

    def run(self, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands on the first host."""
        return self.hosts[0].run(words, seconds, self.environment)

    def srun(self, *program: str, ranks_each: int = 2, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """Run Python with some arguments on ranks of every host."""
        count = len(self.hosts)
        options = [f"--nodes={count}", f"--ntasks-per-node={ranks_each}", f"--mpi={PMI[LIBRARY]}"]
        return self.run("srun", *options, sys.executable, *program, seconds=seconds)
