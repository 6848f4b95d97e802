"""Jobs on a virtual cluster: the command lines of Open MPI's and MPICH's mpirun, and what their ranks tell."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import forked, programs
from tests.cluster.hosts import Cluster, Host
from tests.faults.launch import LAUNCHERS, LIBRARY, MPIRUN, Started

HERE = Path(__file__).parent
# variables of this process that the ranks get too; Open MPI's mpirun hands on only those that it is told to
HANDED_ON = ("PYTHONPATH", "OMP_NUM_THREADS")
# of a job that takes 8 s on two cores that have nothing else to do; each rank needs 2 s of a core to import torch and
# leave Python, and has one for a tenth of the time if 20 others want it
SECONDS = 240.0


def environment(**more: str) -> dict[str, str]:
    """Return the environment that mpirun is started with."""
    own = programs.environment(**more)
    own["PATH"] = f"{MPIRUN.parent}:{own['PATH']}"
    if LIBRARY == "mpich":
        own.setdefault("FI_PROVIDER", "tcp")
    own.pop("HOSTNAME", None)
    own.pop("TMPDIR", None)  # each host has a /tmp of its own
    return own


def remote_shell(cluster: Cluster) -> Path:
    """Return the program that MPI's launchers call in ssh's place."""
    agent = cluster.shared / "ssh"
    if not agent.exists():  # one word, because some launchers split what they are given and some do not
        words = [sys.executable, "-S", str(HERE / "remote_shell.py"), str(cluster.shared / "ssh.socket")]
        agent.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        agent.chmod(0o755)
    return agent


def mpirun(
    cluster: Cluster,
    slots: Sequence[int],
    program: Sequence[str],
    options: Sequence[str] = (),
    names_interface: bool = True,
    **more: str,
) -> list[str]:
    """Return the command line that starts ranks on hosts, to be run on the first of them.

    Args:
        cluster: the hosts.
        slots: how many ranks n1, n2, … get; a host may get none.
        program: the ranks' command.
        options: more for mpirun.
        names_interface: tell MPI to use eth0; without it, it is left to choose, as for most users.
        more: environment variables that the ranks get.
    """
    counts = [(host.name, count) for host, count in zip(cluster.hosts, slots, strict=False) if count]
    with tempfile.NamedTemporaryFile("w", dir=cluster.shared, prefix="hosts-", delete=False) as file:
        file.writelines(f"{name}:{n}\n" if LIBRARY == "mpich" else f"{name} slots={n}\n" for name, n in counts)
    agent = str(remote_shell(cluster))
    if LIBRARY == "mpich":
        start = ["-f", file.name, "-launcher", "ssh", "-launcher-exec", agent]
        start += ["-iface", "eth0"] if names_interface else []
    else:
        start = ["--hostfile", file.name, "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", agent]
        start += ["--map-by", "slot:oversubscribe", "--bind-to", "none"]
        if names_interface:
            start += ["--prtemca", "oob_tcp_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0"]
        start += [word for name in (*HANDED_ON, *more) for word in ("-x", name)]
    return [str(MPIRUN), *start, *options, "-n", str(sum(slots)), *program]


def forked_python(cluster: Cluster, slots: Sequence[int]) -> list[str]:
    """Return the words that fork a program from a process of its host that has imported torch."""
    path = "/tmp/forked"  # each host has a /tmp of its own
    for host, count in zip(cluster.hosts, slots, strict=False):
        if count and host.server is None:
            host.server = forked.start(path, environment(), host.command)
    return forked.words(path)


def run(
    cluster: Cluster,
    slots: Sequence[int],
    program: Sequence[str],
    seconds: float = SECONDS,
    options: Sequence[str] = (),
    names_interface: bool = True,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program on several hosts, and return its status and what it wrote.

    A Python program (``sys.executable`` and its arguments) is forked.

    Raises:
        AssertionError: it has not ended in time; its processes are killed.
    """
    if program[0] == sys.executable:
        program = [*forked_python(cluster, slots), *program[1:]]
    command = mpirun(cluster, slots, program, options, names_interface, **more)
    first = next(host for host, count in zip(cluster.hosts, slots, strict=False) if count)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            first.command(command), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment(**more), text=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        status = process.poll()
        if status is None:
            for host in cluster.hosts:
                host.end_processes()
            process.wait(30)
        texts = []
        for file in out, err:
            file.seek(0)
            texts.append(file.read())
        assert status is not None, f"{program} has not ended after {seconds} s\n{texts[0]}\n{texts[1]}"
    return subprocess.CompletedProcess(list(program), status, *texts)


class Job(Started):
    """A job of Python ranks on virtual hosts, under way.

    Args:
        cluster: the hosts.
        launcher: a key of ``LAUNCHERS``.
        slots: how many ranks n1, n2, … get.
        script: what each rank runs.
        arguments: the script's.
        environment: more variables for the ranks.
    """

    def __init__(
        self,
        cluster: Cluster,
        launcher: str,
        slots: Sequence[int],
        script: Path,
        arguments: Sequence[str],
        options: Sequence[str] = (),
        **more: str,
    ) -> None:
        folder = Path(tempfile.mkdtemp(dir=cluster.shared, prefix="job-"))
        given = {"TORCH_FR_DUMP_TEMP_FILE": f"{folder}/trace_", **more}
        # without --oversubscribe, which mpirun's --map-by says here
        chosen = [each for each in LAUNCHERS[launcher] if each != "--oversubscribe"]
        program = [sys.executable, str(script), *arguments]
        command = mpirun(cluster, slots, program, [*chosen, *options], **given)
        self.cluster, self.slots, self.script = cluster, slots, script
        super().__init__(cluster.hosts[0].command(command), environment(**given), folder)

    def host_of(self, rank: int) -> Host:
        """Return the host of a rank."""
        for host, count in zip(self.cluster.hosts, self.slots, strict=False):
            if rank < count:
                return host
            rank -= count
        raise ValueError("there are fewer ranks")

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank that has told something."""
        self.host_of(rank).signal(self.pids()[rank], number)

    def ranks_alive(self) -> dict[str, list[str]]:
        """Return by host the ranks' processes that are still there."""
        program = f"{sys.executable} {self.script}"
        found: dict[str, list[str]] = {}
        for host in self.cluster.hosts:
            own = [text for text in host.processes().values() if text.startswith(program)]  # not the launcher's
            if own:
                found[host.name] = own
        return found

    def close(self) -> None:
        """End what is left of the job."""
        for host in self.cluster.hosts:
            host.end_processes()
        super().close()
