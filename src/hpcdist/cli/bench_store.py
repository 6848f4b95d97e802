"""How fast are our stores beside torch's own TCPStore, in one run?

    python -m hpcdist bench store [--json] [--rounds N] [--only NAME]

Each row is measured on all kinds in turn, round by round, so that other work on the machine hits all
alike; the median of the rounds counts; for times of single calls the best one, since they have two
modes, ten times apart, by whether the two processes share a core. The kinds: torch's client on its own
server, ours on ours, ours on torch's, torch's on ours. Servers run in processes of their own, on
loopback.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.pool
import os
import resource
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reports each refused connection at length
import torch.distributed as dist

import stores

KINDS = {  # name -> (is the server ours, is the client ours)
    "torch": (False, False),
    "ours": (True, True),
    "ours on torch": (False, True),
    "torch on ours": (True, False),
}
# row -> (unit, is a lower figure better, most that ours / torch may be, or least for rates)
TARGETS: dict[str, tuple[str, bool, float | None]] = {
    "get": ("us", True, 1.0),
    "add": ("us", True, 2.0),
    "check": ("us", True, 2.0),
    "set": ("us", True, None),
    "wake-up": ("us", True, 2.0),
    "multi_get of 1000": ("us", True, 1.0),
    "calls, 1 process": ("1/s", False, None),
    "calls, 8 processes": ("1/s", False, 0.5),
    "512 clients up": ("ms", True, 2.0),
    "1024 clients up": ("ms", True, 2.0),
    "memory a client": ("KiB", True, None),
    "memory under lengths": ("MiB", True, None),
}
OURS_ON_TORCH_MOST = 1.3
CLIENT_KIB_MOST, ATTACK_MIB_MOST = 8.0, 32.0
SOON = timedelta(seconds=60)
NAMES = [f"key{i:04}" for i in range(1000)]


def _own_server(pipe: Any, is_ours: bool) -> None:
    _raise_limit()
    store = (stores if is_ours else dist).TCPStore("127.0.0.1", 0, None, True, SOON)
    pipe.send((store.port, store._server.process.pid if is_ours else os.getpid()))
    pipe.recv()


def _raise_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Server:
    """Runs one server in a process of its own."""

    def __init__(self, context: Any, is_ours: bool) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_own_server, args=(theirs, is_ours))
        self.process.start()
        self.port, self.pid = self.pipe.recv()

    def resident(self) -> float:
        """Return the server process's resident memory in KiB."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize() / 1024

    def stop(self) -> None:
        """End the server."""
        self.pipe.send("stop")
        self.process.join(5)
        self.process.kill()


def _client(port: int, is_ours: bool) -> Any:
    return (stores if is_ours else dist).TCPStore("127.0.0.1", port, None, False, SOON)


def _micros(call: Callable[[], Any], count: int) -> float:
    for _ in range(count // 10):
        call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e6


def _calls(name: str, server: Server, is_ours: bool) -> float:
    client = _client(server.port, is_ours)
    client.set("key", b"x" * 32)
    if name == "multi_get of 1000":
        client.multi_set(NAMES, NAMES)
        return _micros(lambda: client.multi_get(NAMES), 50)
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: client.get("key"),
        "add": lambda: client.add("count", 1),
        "check": lambda: client.check(["key"]),
        "set": lambda: client.set("key", b"x" * 32),
    }
    result = _micros(calls[name], 2000)
    client.get("key")  # what was set has been taken before the next kind is measured
    return result


def _answer(port: int, is_ours: bool, count: int, tag: str) -> None:
    client = _client(port, is_ours)
    for i in range(count):
        client.wait([f"{tag}/ask{i}"])
        client.set(f"{tag}/answer{i}", "1")


def _wake_up(server: Server, is_ours: bool, context: Any) -> float:
    """Two processes wake each other in turn; half a round is one wake-up."""
    count, tag = 300, str(time.monotonic_ns())
    other = context.Process(target=_answer, args=(server.port, is_ours, count, tag))
    other.start()
    client = _client(server.port, is_ours)
    start = 0.0
    for i in range(count):
        if i == count // 10:
            start = time.perf_counter()
        client.set(f"{tag}/ask{i}", "1")
        client.wait([f"{tag}/answer{i}"])
    took = time.perf_counter() - start
    other.join(10)
    return took / (count - count // 10) / 2 * 1e6


def _count_calls(port: int, is_ours: bool, start_at: float, seconds: float) -> int:
    client = _client(port, is_ours)
    time.sleep(max(0.0, start_at - time.time()))
    end = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end:
        for _ in range(20):
            client.add("count", 1)
        count += 20
    return count


def _rate(server: Server, is_ours: bool, pool: multiprocessing.pool.Pool, processes: int) -> float:
    seconds = 0.5
    jobs = [(server.port, is_ours, time.time() + 0.2, seconds)] * processes
    return sum(pool.starmap(_count_calls, jobs, chunksize=1)) / seconds


def _bring_up(server: Server, is_ours: bool, count: int) -> tuple[float, float]:
    before = server.resident()
    start = time.perf_counter()
    clients = [_client(server.port, is_ours) for _ in range(count)]
    took = (time.perf_counter() - start) * 1e3
    memory = (server.resident() - before) / count
    del clients
    time.sleep(0.1)  # the server takes note of the ends
    return took, memory


def _attack(server: Server) -> float:
    """Announce 256 MiB in nine bytes and send halves of large values; return the MiB it cost."""
    rest = peak = server.resident()
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, server.resident())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    hello = b"\0" + struct.pack("<I", 0x3C85F7CE)
    key = struct.pack("<Q", 1) + b"k"
    sockets = []
    for i in range(20):
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.settimeout(0.2)
        sockets.append(sock)
        half = b"\1" + key + struct.pack("<Q", 8 << 20) + b"x" * (4 << 20)
        try:
            sock.sendall(hello + (half if i % 2 else b"\1" + struct.pack("<Q", 256 << 20)))
        except OSError:
            continue  # refused or held back: what the server is meant to do
    time.sleep(0.3)
    over.set()
    watcher.join()
    for sock in sockets:
        sock.close()
    return (peak - rest) / 1024


def measure(rounds: int, only: str | None) -> dict[str, dict[str, float]]:
    """Measure all rows on all kinds, interleaved.

    Args:
        rounds: How often each row is measured.
        only: Part of a row's name; None for all rows.

    Returns:
        Row name -> kind -> median.
    """
    _raise_limit()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "stores", "hpcdist.cli.bench_store"])
    servers = {is_ours: Server(context, is_ours) for is_ours in (False, True)}
    figures: dict[str, dict[str, list[float]]] = {row: {kind: [] for kind in KINDS} for row in TARGETS}
    wanted = [row for row in TARGETS if only is None or only in row]
    try:
        with context.Pool(8) as pool:
            for _ in range(rounds):
                for row in wanted:
                    for kind, (server_is_ours, client_is_ours) in KINDS.items():
                        server = servers[server_is_ours]
                        found = figures[row][kind]
                        if row == "wake-up":
                            found.append(_wake_up(server, client_is_ours, context))
                        elif row.startswith("calls"):
                            processes = int(row.split()[1])
                            found.append(_rate(server, client_is_ours, pool, processes))
                        elif row.endswith("clients up"):
                            took, memory = _bring_up(server, client_is_ours, int(row.split()[0]))
                            found.append(took)
                            figures["memory a client"][kind].append(memory)
                        elif row == "memory under lengths":
                            if server_is_ours == client_is_ours:
                                found.append(_attack(server))
                        elif row != "memory a client":
                            found.append(_calls(row, server, client_is_ours))
    finally:
        for server in servers.values():
            server.stop()
    pick: dict[str, Callable[[list[float]], float]] = {"memory a client": max, "memory under lengths": max}
    pick |= {row: min for row, (unit, _, _) in TARGETS.items() if unit == "us"}
    return {
        row: {kind: float(pick.get(row, statistics.median)(values)) for kind, values in kinds.items() if values}
        for row, kinds in figures.items()
        if any(kinds.values())
    }


def _verdict(row: str, found: dict[str, float]) -> str:
    _, is_lower_better, limit = TARGETS[row]
    ours, torchs = found["ours"], found["torch"]
    fixed = {"memory a client": CLIENT_KIB_MOST, "memory under lengths": ATTACK_MIB_MOST}.get(row)
    if fixed is not None:
        return f"{'reached' if ours <= fixed else 'missed'} (at most {fixed:g})"
    if limit is None:
        return ""
    is_reached = ours / torchs <= limit if is_lower_better else ours / torchs >= limit
    return f"{'reached' if is_reached else 'missed'} (at {'most' if is_lower_better else 'least'} {limit:g} x)"


def run(args: list[str]) -> int:
    """Run the benchmark and print a table.

    Args:
        args: The command line behind ``bench store``.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="hpcdist bench store", description="Our TCPStore beside torch's.")
    parser.add_argument("--rounds", type=int, default=5, help="how often each row is measured (default 5)")
    parser.add_argument("--only", help="measure the rows with this in their name")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args(args)
    figures = measure(options.rounds, options.only)
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rounds": options.rounds, "figures": figures}, indent=1))
        return 0
    table = Table(title=f"stores.TCPStore beside torch's ({os.cpu_count()} cores, {options.rounds} rounds)")
    for heading in ("", "unit", *KINDS, "ours / torch", "ours on torch / torch", "target"):
        table.add_column(heading, justify="left" if heading in ("", "unit", "target") else "right")
    for row, found in figures.items():
        cells = [f"{found[kind]:,.1f}" if kind in found else "" for kind in KINDS]
        ratios = [
            f"{found[kind] / found['torch']:.2f}" if kind in found and found["torch"] else ""
            for kind in ("ours", "ours on torch")
        ]
        table.add_row(row, TARGETS[row][0], *cells, *ratios, _verdict(row, found))
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    Console().print(f"ours on torch's server: at most {OURS_ON_TORCH_MOST} x torch's client on it")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
