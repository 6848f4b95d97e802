"""Keeper of a virtual cluster: the first process of a process namespace that holds the switch and all hosts.

The kernel ends every process of a process namespace with its first one, and a network or mount namespace goes with its
last process. So nothing outlives this process: no host, bridge, veth pair, mount or daemon. It exits when its standard
input closes, which happens when the test run ends, in whatever way.

It also takes sshd's place for MPI's launchers: ``remote_shell.py`` asks by a Unix socket for a command on a host and
hands its own stdin, stdout and stderr over. That needs no network: a link that is down does not keep a job from
starting.

Usage: ``python switch.py FOLDER`` with a line of JSON on standard input: ``hosts`` (names), ``networks`` (interface to
the first three numbers of its addresses) and ``shared`` (folders under /tmp that all hosts see).
Standard library only, so that it starts at once.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path

HERE = Path(__file__).parent
UNSHARE = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")
ENTER = ("nsenter", "-n", "-m", "-u", "-i", "-p", "-t")
# as sshd does: nothing of the caller's environment comes along
REMOTE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
}


def run(*command: str) -> None:
    """Run a command.

    Raises:
        SystemExit: it failed; with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def start_host(folder: Path, name: str, shared: list[str]) -> int:
    """Start the first process of a host, and return its process id in this namespace."""
    with open(folder / "host.log", "wb") as log:
        starter = subprocess.Popen(
            [*UNSHARE, "bash", str(HERE / "host.sh"), str(folder), name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "SHARED_FOLDERS": ":".join(shared)},
        )
    assert starter.stdout is not None
    if starter.stdout.readline() != b"ready\n":
        raise SystemExit(f"{name} did not start: {(folder / 'host.log').read_text()}")
    return int(Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()[0])


def connect(number: int, pid: int, networks: dict[str, str]) -> None:
    """Join a host to each network's bridge by a veth pair."""
    inside = ["nsenter", "-t", str(pid), "-n", "--"]
    for interface, prefix in networks.items():
        port = f"port{number}{interface}"
        run("ip", "link", "add", port, "type", "veth", "peer", "name", interface, "netns", str(pid))
        run("ip", "link", "set", port, "master", f"br-{interface}", "up")
        run(*inside, "ip", "addr", "add", f"{prefix}.{number}/24", "brd", "+", "dev", interface)
        run(*inside, "ip", "link", "set", interface, "up")


def serve(path: Path, pids: dict[str, int]) -> None:
    """Start commands on hosts for whoever asks by a socket."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(64)
    while True:
        client, _ = server.accept()
        threading.Thread(target=serve_one, args=(client, pids), daemon=True).start()


def serve_one(client: socket.socket, pids: dict[str, int]) -> None:
    """Start one command, and answer with its status when it has ended."""
    with client:
        data, ancillary, *_ = client.recvmsg(65536, socket.CMSG_SPACE(3 * 4))
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content)
        while not data.endswith(b"\n"):
            data += client.recv(65536)
        asked = json.loads(data)
        process = subprocess.Popen(
            [*ENTER, str(pids[asked["host"]]), "--", "bash", "-c", f"cd /root 2>/dev/null || cd /; {asked['command']}"],
            stdin=descriptors[0],
            stdout=descriptors[1],
            stderr=descriptors[2],
            start_new_session=True,
            env=REMOTE_ENVIRONMENT,
        )
        for each in descriptors:
            os.close(each)
        status = process.wait()
        with contextlib.suppress(OSError):  # the launcher may have ended
            client.sendall(f"{status}\n".encode())


def main(folder: Path) -> None:
    """Build the cluster, say that it is ready, and hold it until standard input closes."""
    asked = json.loads(sys.stdin.readline())
    networks: dict[str, str] = asked["networks"]
    try:
        run("ip", "link", "set", "lo", "up")
        for interface in networks:
            run("ip", "link", "add", f"br-{interface}", "type", "bridge")
            run("ip", "link", "set", f"br-{interface}", "up")
        pids = {}
        for number, name in enumerate(asked["hosts"], 1):
            own = folder / name
            own.mkdir()
            (own / "hosts").touch()  # written from outside, in place
            (own / "hostname").write_text(f"{name}\n")
            (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
            pids[name] = start_host(own, name, asked["shared"])
            connect(number, pids[name], networks)
        threading.Thread(target=serve, args=(folder / "shared" / "ssh.socket", pids), daemon=True).start()
        print(json.dumps(pids), flush=True)
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all of this namespace but its first process, this one
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
