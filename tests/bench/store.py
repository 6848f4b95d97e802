"""Comparison of ``stores.TCPStore`` with torch's TCPStore, client and server in all combinations.

    python -m tests.bench.store [--json] [--rounds N] [--only NAME]

Each row is measured on all combinations in turn, round by round, so that other work on the machine affects all of them
alike; the median of the rounds counts. The combinations: torch's client on its own server, ours on ours, ours on
torch's, torch's on ours. Servers run in processes of their own, on loopback.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.bench import store_rows as rows
from tests.bench.store_rows import Server, Setting

KINDS = {  # name -> (is the server ours, is the client ours)
    "torch": (False, False),
    "ours": (True, True),
    "ours on torch": (False, True),
    "torch on ours": (True, False),
}


class Row(NamedTuple):
    """How a row is measured, its unit, and its targets."""

    take: Callable[[Setting], float]
    unit: str
    most: float | None = None  # ours / torch's
    least: float | None = None  # ours / torch's
    most_alone: float | None = None  # ours
    least_alone: float | None = None  # ours


ON_TORCH_MOST = 1.3  # our client's time of a call over torch's, both on torch's server
MOST = {  # a call on given cores -> the most that ours / torch's may be
    "get": 1.0,
    "add": 2.0,
    "check": 2.0,
    "compare_set": 2.0,
    "set": None,
    "multi_get of 1000": 1.2,
    "multi_set of 1000": 1.5,
    "wake-up": 2.0,
}
ROWS = {
    f"{name}, {place}": Row(partial(rows.placed, name, place), "us", most)
    for name, most in MOST.items()
    for place in rows.PLACES
} | {
    "calls, 1 process": Row(partial(rows.rate, processes=1), "1/s"),
    "calls, 8 processes": Row(partial(rows.rate, processes=8), "1/s", least=0.5),
    "calls, 8 threads": Row(partial(rows.threads_rate, threads=8), "1/s", least=0.6),
    "128 clients up": Row(partial(rows.bring_up, count=128), "ms", most=2.0),
    "512 clients up": Row(partial(rows.bring_up, count=512), "ms", most=2.0),
    "1024 clients up": Row(partial(rows.bring_up, count=1024), "ms", most=2.0),
    "get p99, busy owner": Row(rows.slow_get, "ms", most_alone=2.0),
    "rate kept, busy owner": Row(rows.kept_rate, "part", least_alone=0.5),
}


def measure(rounds: int, only: str | None) -> dict[str, dict[str, float]]:
    """Measure all rows, or those with a text in their name, so many times on all combinations, interleaved.

    Returns row name -> kind -> median.
    """
    rows.raise_limit()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "hpcdist_stores", "tests.bench.store_rows"])
    servers = {is_ours: Server(context, is_ours) for is_ours in (False, True)}
    wanted = {name: row for name, row in ROWS.items() if only is None or only in name}
    figures: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in wanted}
    try:
        with context.Pool(8) as pool:
            for _ in range(rounds):
                for name, row in wanted.items():
                    for kind, (server_is_ours, client_is_ours) in KINDS.items():
                        setting = Setting(servers[server_is_ours], client_is_ours, context, pool)
                        figures[name][kind].append(row.take(setting))
    finally:
        for server in servers.values():
            server.stop()
    return {
        name: {kind: statistics.median(values) for kind, values in kinds.items()} for name, kinds in figures.items()
    }


def verdict(name: str, found: dict[str, float]) -> str:
    """Return for each target of a row whether it is reached, also for our client on torch's server."""
    row, ours = ROWS[name], found["ours"]
    ratio = ours / found["torch"]
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
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.store", description="Our TCPStore beside torch's.")
    parser.add_argument("--rounds", type=int, default=5, help="how often each row is measured (default 5)")
    parser.add_argument("--only", help="measure the rows with this in their name")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args(args)
    figures = measure(options.rounds, options.only)
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rounds": options.rounds, "figures": figures}, indent=1))
        return 0
    table = Table(title=f"hpcdist_stores.TCPStore beside torch's ({os.cpu_count()} cores, {options.rounds} rounds)")
    for heading in ("", "unit", *KINDS, "ours / torch", "ours on torch / torch", "target"):
        table.add_column(heading, justify="left" if heading in ("", "unit", "target") else "right")
    for row, found in figures.items():
        cells = [f"{found[kind]:,.1f}" for kind in KINDS]
        ratios = [f"{found[kind] / found['torch']:.2f}" for kind in ("ours", "ours on torch")]
        table.add_row(row, ROWS[row].unit, *cells, *ratios, verdict(row, found))
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
