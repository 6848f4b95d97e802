"""Client in ssh's place: ``remote_shell.py SOCKET [-x …] HOST COMMAND …``, as MPI's launchers call ssh."""

from __future__ import annotations

import array
import json
import socket
import sys


def main(path: str, words: list[str]) -> int:
    """Have a command run on a host with this process's stdin, stdout and stderr; return its status."""
    while words and words[0].startswith("-"):
        words = words[1:]
    host, command = words[0].rpartition("@")[2], " ".join(words[1:])
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    asked = json.dumps({"host": host, "command": command}).encode() + b"\n"
    client.sendmsg([asked], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    status = int(client.makefile().readline() or 255)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
