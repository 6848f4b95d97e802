"""Output of the figures: a table with ratios, JSON, CSV."""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hpcdist as dist
from hpcdist.backends.mpi.node import threshold_file, thresholds
from hpcdist.backends.nccl import library
from hpcdist.cli.bench.timing import Bench, Figure
from hpcdist.core.printing import format_size
from hpcdist.launch.topology import processor

OURS = "hpcdist"
WIDTH = 150  # under mpirun the terminal seems to have 80 columns
WHOLE_FROM = 100  # microseconds without decimals


def microseconds(value: float) -> str:
    """Write a time with three significant digits or more."""
    return f"{value:.0f}" if value >= WHOLE_FROM else f"{value:.1f}"


def machine() -> dict[str, Any]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_initialized():
        version = ".".join(map(str, library.load().version))
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "nccl": version}
    return {"cores": os.cpu_count(), "cpu": processor(), **found}


def by_call(figures: list[Figure]) -> dict[tuple[str, str, int], dict[str, Figure]]:
    calls: dict[tuple[str, str, int], dict[str, Figure]] = {}
    for figure in figures:
        calls.setdefault((figure.what, figure.dtype, figure.nbytes), {})[figure.side] = figure
    return calls


def comparison(
    figures: list[Figure], cell: Callable[[Figure], str], digits: str
) -> tuple[list[str], list[str], list[list[str]]]:
    """Return figures as a table: the sides, hpcdist's rivals, and a row for each call.

    A row has the call's name, dtype and size, a cell for each side, and hpcdist's time over each rival's, with
    ``digits`` decimals.
    """
    sides = list(dict.fromkeys(figure.side for figure in figures))
    rivals = [side for side in sides if side != OURS and OURS in sides]
    rows = []
    for (what, dtype, nbytes), found in by_call(figures).items():
        cells = [cell(found[side]) if side in found else "" for side in sides]
        pairs = ((found.get(OURS), found.get(rival)) for rival in rivals)
        ratios = [format(ours.median / other.median, digits) if ours and other else "" for ours, other in pairs]
        rows.append([what, dtype, format_size(nbytes) if nbytes else "", *cells, *ratios])
    return sides, rivals, rows


def cell(figure: Figure) -> str:
    """Write a time and its spread, and the bytes of a call from the node that sent most, if they were counted."""
    text = f"{microseconds(figure.median)} ({microseconds(figure.low)}–{microseconds(figure.high)})"
    return f"{text}\n{format_size(figure.wire)} sent" if figure.wire >= 1 else text


def table(bench: Bench) -> Table:
    sides, rivals, rows = comparison(bench.figures, cell, ".2f")
    nodes, sent = (
        ("", "") if bench.wire.nodes == 1 else (f"{bench.wire.nodes} nodes, ", "; what the node sent that sent most")
    )
    title = f"{bench.size} ranks, {nodes}{bench.library}, µs a call: median (lowest–highest round){sent}"
    made = Table("what", "dtype", "size", title=title)
    for side in (*sides, *(f"{OURS} /\n{rival}" for rival in rivals)):
        made.add_column(side, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def least(nbytes: int) -> str:
    return "never" if nbytes == threshold_file.NEVER else f"from {format_size(nbytes)}"


def explain(bench: Bench) -> None:
    """Print the sizes from which each collective goes through shared memory here; every rank calls."""
    from hpcdist.backends.mpi.node.places import locate  # it imports mpi4py.MPI, and there may be no library

    places = locate(bench.comm, [])
    places.node.Free()
    if bench.rank:
        return
    vendor, nodes, console = bench.library.rsplit(" ", 1)[0], places.nodes, Console(width=110)
    place = f"{bench.size} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")
    title = f"Through shared memory ({vendor}, {place}; {threshold_file.VARIABLE} overrides)"
    made = Table("collective", "float32", "bfloat16", title=title)
    found: thresholds.Thresholds = dist.group.WORLD.cpu.collectives.plans.thresholds  # type: ignore[union-attr]
    for name in thresholds.COLLECTIVES:
        op = "SUM" if "reduce" in name else None
        cells = (
            least(found.of(name, dtype, op, nodes, places.ranks_per_node, bench.size, vendor))
            for dtype in (torch.float32, torch.bfloat16)
        )
        made.add_row(name, *cells)
    console.print(made)
    source = "measured for this library"
    if found.path:
        source = f"measured on this processor: {found.path}"
    elif threshold_file.is_file(found.text):
        source = f"{found.text} says nothing of {processor()!r}; the built-in table holds"
    elif found.text:
        source = f"{threshold_file.VARIABLE}={found.text}"
    elif vendor not in {library for library, _ in thresholds.BYTES}:
        source = f"not measured for this library: the row of {thresholds.STAND_IN} stands in"
    console.print(f"Source: {source}.")


def unwritable(options: Any) -> str:
    """Return an error if one of the output files cannot be written, before the measurement."""
    for path in filter(None, (options.json, options.csv, options.html)):
        try:
            open(path, "a").close()
        except OSError as error:
            return str(error)
    return ""


def write(bench: Bench) -> None:
    if bench.rank or not bench.figures:
        return
    options = bench.options
    Console(width=max(WIDTH, Console().width)).print(table(bench))
    if options.json:
        content = {
            "machine": machine(),
            "mpi": bench.library,
            "ranks": bench.size,
            "nodes": bench.wire.nodes,
            "figures": [asdict(figure) for figure in bench.figures],
        }
        Path(options.json).write_text(json.dumps(content, indent=1))
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["mpi", "ranks", *asdict(bench.figures[0])])
            writer.writerows([bench.library, bench.size, *asdict(figure).values()] for figure in bench.figures)
