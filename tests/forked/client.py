"""Client of the fork server: ``python -I -S client.py SOCKET ARGUMENT…`` is the program, for whoever started it."""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Have the program started, pass signals on to it, and end as it does."""
    numbers = [int(each) for each in os.listdir("/proc/self/fd")]
    files = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]  # not that of the listing
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    request = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd(), files]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "little")], files)
    server.sendall(request)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    answer = server.recv(4)
    while len(answer) < 4:
        answer += server.recv(4 - len(answer)) or sys.exit("the fork server has ended")
    status = int.from_bytes(answer, "little", signed=True)
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
