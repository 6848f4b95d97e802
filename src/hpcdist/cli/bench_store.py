"""How fast are our stores beside torch's own TCPStore, in one run?

    python -m hpcdist bench store [--json] [--rounds N] [--only NAME]

Each row is measured on all kinds in turn, round by round, so that other work on the machine hits all alike; the median
of the rounds counts. The kinds: torch's client on its own server, ours on ours, ours on torch's, torch's on ours.
Servers run in processes of their own, on loopback.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from hpcdist.cli import bench_store_rows as rows
from hpcdist.cli.bench_store_rows import PLACES, Server

KINDS = {  # name -> (is the server ours, is the client ours)
    "torch": (False, False),
    "ours": (True, True),
    "ours on torch": (False, True),
    "torch on ours": (True, False),
}


class Row(NamedTuple):
    """What a row is measured in, and what was promised of it."""

    unit: str
    most: float | None = None  # ours / torch's
    least: float | None = None  # ours / torch's
    most_alone: float | None = None  # ours
    least_alone: float | None = None  # ours


ON_TORCH_MOST = 1.3  # our client's time of a call over torch's, both on torch's server
CALLS = {
    "get": Row("us", most=1.0),
    "add": Row("us", most=2.0),
    "check": Row("us", most=2.0),
    "set": Row("us"),
    "multi_get of 1000": Row("us", most=1.0),
    "wake-up": Row("us", most=2.0),
}
ROWS = {f"{name}, {place}": row for name, row in CALLS.items() for place in PLACES} | {
    "calls, 1 process": Row("1/s"),
    "calls, 8 processes": Row("1/s", least=0.5),
    "512 clients up": Row("ms", most=2.0),
    "1024 clients up": Row("ms", most=2.0),
    "memory a client": Row("KiB", most_alone=8.0),
    "memory under lengths": Row("MiB", most_alone=32.0),
    "get p99, busy owner": Row("ms", most_alone=2.0),
    "rate kept, busy owner": Row("part", least_alone=0.5),
}


def measure(rounds: int, only: str | None) -> dict[str, dict[str, float]]:
    """Measure all rows on all kinds, interleaved.

    Args:
        rounds: How often each row is measured.
        only: Part of a row's name; None for all rows.

    Returns:
        Row name -> kind -> median.
    """
    rows.raise_limit()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "stores", "hpcdist.cli.bench_store_rows"])
    servers = {is_ours: Server(context, is_ours) for is_ours in (False, True)}
    figures: dict[str, dict[str, list[float]]] = {row: {kind: [] for kind in KINDS} for row in ROWS}
    wanted = [row for row in ROWS if only is None or only in row]
    try:
        with context.Pool(8) as pool:
            for _ in range(rounds):
                for row in wanted:
                    for kind, (server_is_ours, client_is_ours) in KINDS.items():
                        server = servers[server_is_ours]
                        found = figures[row][kind]
                        name, _, place = row.partition(", ")
                        if name in CALLS:
                            with rows.placed(server, place) as cores:
                                if name == "wake-up":
                                    found.append(rows.wake_up(server, client_is_ours, context, cores))
                                else:
                                    found.append(rows.call_time(name, server, client_is_ours))
                        elif name == "calls":
                            found.append(rows.rate(server, client_is_ours, pool, int(place.split()[0])))
                        elif row.endswith("clients up"):
                            took, memory = rows.bring_up(server, client_is_ours, int(row.split()[0]))
                            found.append(took)
                            figures["memory a client"][kind].append(memory)
                        elif row == "memory under lengths":
                            if server_is_ours == client_is_ours:
                                found.append(rows.attack(server))
                        elif row == "get p99, busy owner":
                            found.append(rows.slow_get(server, client_is_ours))
                        elif row == "rate kept, busy owner":
                            found.append(rows.kept_rate(server, client_is_ours, pool))
    finally:
        for server in servers.values():
            server.stop()
    worst: dict[str, Callable[[list[float]], float]] = {"memory a client": max, "memory under lengths": max}
    return {
        row: {kind: float(worst.get(row, statistics.median)(values)) for kind, values in kinds.items() if values}
        for row, kinds in figures.items()
        if any(kinds.values())
    }


def verdict(name: str, found: dict[str, float]) -> str:
    """Say whether a row keeps its promises; the second is that of our client on torch's server."""
    row, ours = ROWS[name], found["ours"]
    ratio = ours / found["torch"] if found["torch"] else 0.0
    promises = [
        (row.most, ratio <= (row.most or 0), "≤ {:g} ×"),
        (row.least, ratio >= (row.least or 0), "≥ {:g} ×"),
        (row.most_alone, ours <= (row.most_alone or 0), "≤ {:g}"),
        (row.least_alone, ours >= (row.least_alone or 0), "≥ {:g}"),
    ]
    if row.unit == "us" and row.most is not None:
        promises.append((ON_TORCH_MOST, found["ours on torch"] / found["torch"] <= ON_TORCH_MOST, "on torch ≤ {:g} ×"))
    return "\n".join(
        f"{text.format(limit)}: {'reached' if is_kept else 'MISSED'}" for limit, is_kept, text in promises if limit
    )


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
        table.add_row(row, ROWS[row].unit, *cells, *ratios, verdict(row, found))
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
