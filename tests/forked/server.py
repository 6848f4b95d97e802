"""Fork server: ``python server.py SOCKET`` imports torch, and forks for each client that connects to the socket."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from types import ModuleType
from typing import Any

import numpy  # noqa: F401
import torch
import torch.distributed

MOST_FILES = 64
PR_SET_PDEATHSIG = 1


def request_of(client: socket.socket) -> tuple[list[Any], list[int]] | None:
    """Return what a client asks for, and its files; None if it was killed meanwhile."""
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(client, 8, MOST_FILES)
        return json.loads(client.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)), files
    except (OSError, ValueError):
        for each in files:
            os.close(each)
        client.close()
        return None


def serve(path: str) -> tuple[list[str], dict[str, str]]:
    """Fork for each client; return only in a child, with its arguments and environment."""
    listener = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(FileNotFoundError):  # of an earlier server
        os.unlink(path)
    listener.bind(path)
    listener.listen(64)
    print(os.getpid(), flush=True)  # it listens
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    events.register(sys.stdin, selectors.EVENT_READ)  # a pipe of whoever started this: it can be read when they end
    ends: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of a child's end: its process id and client
    children: dict[socket.socket, tuple[int, int]] = {}  # by client: the process id, and the descriptor of its end
    while True:
        for key, _ in events.select():
            if key.fileobj is sys.stdin:
                os._exit(0)  # the kernel ends the children
            elif key.fileobj is listener:
                client, _ = listener.accept()
                if (asked := request_of(client)) is None:
                    continue
                request, files = asked
                if (child := os.fork()) == 0:
                    events.close()  # now: Python would close them later, when the program has files of these numbers
                    # of a killed client too, whose child has not ended yet
                    for each in (listener, client, *(one for _, one in ends.values())):
                        each.close()
                    return become(request, files)
                for each in files:
                    os.close(each)
                end = os.pidfd_open(child)
                ends[end], children[client] = (child, client), (child, end)
                events.register(end, selectors.EVENT_READ)
                events.register(client, selectors.EVENT_READ)
            elif key.fd in ends:
                child, client = ends.pop(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                events.unregister(key.fd)
                os.close(key.fd)
                if children.pop(client, None) is not None:
                    events.unregister(client)
                    with_client(client.sendall, status.to_bytes(4, "little", signed=True))
                client.close()
            elif key.fileobj in children:  # whose child has not ended since the look
                client = key.fileobj
                child, _ = children[client]
                sent = with_client(client.recv, 64)
                if sent:
                    for number in sent:
                        os.kill(child, number)
                else:  # it was killed
                    del children[client]
                    events.unregister(client)
                    os.kill(child, signal.SIGKILL)


def with_client(call: Any, argument: Any) -> Any:
    """Call a method of a client's socket; None if it has been killed."""
    try:
        return call(argument)
    except OSError:
        return None


def become(request: list[Any], files: list[int]) -> tuple[list[str], dict[str, str]]:
    """Make this child what the client is: its files, its folder; return its arguments and environment."""
    arguments, environment, folder, numbers = request
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The process ends before the destructors of the libraries that the server has loaded, which would write to pages
    # that all children share: 0.15 s for each. Python ends as always, and MPI's library, which is loaded later.
    libc.on_exit(libc._exit, None)
    os.setpgid(0, 0)
    # above all numbers in use: the server has two files for each program that runs
    first = max([*map(int, os.listdir("/proc/self/fd")), *numbers]) + 1
    high = [os.dup2(each, first + index) for index, each in enumerate(files)]
    os.closerange(3, first)
    for each, number in zip(high, numbers, strict=True):
        os.dup2(each, number)
        os.set_inheritable(number, True)
        os.close(each)
    os.chdir(folder)
    return arguments, environment


gc.collect()
gc.freeze()  # no child looks through what was imported, at its end for one
arguments, environment = serve(sys.argv[1])
os.environ.clear()
os.environ.update(environment)
sys.path[1:1] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
del environment
torch.distributed.set_debug_level_from_env()  # as its import does
program = sys.modules["__main__"] = ModuleType("__main__")
if arguments[0] == "-m":
    sys.argv = arguments[1:]
    sys.path[0] = os.getcwd()
    runpy._run_module_as_main(arguments[1])
else:
    if arguments[0] == "-c":
        sys.argv, sys.path[0], source, name = ["-c", *arguments[2:]], "", arguments[1], "<string>"
    else:
        sys.argv, sys.path[0], name = arguments, os.path.dirname(os.path.abspath(arguments[0])), arguments[0]
        program.__file__ = name
        with open(name) as file:
            source = file.read()
    exec(compile(source, name, "exec"), program.__dict__)
