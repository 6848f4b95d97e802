"""Writes the plots and tables of performance.md, scaling.md and the README from the figures in explanation/figures.

python docs/figures.py              draws the plots and writes the tables
python docs/figures.py --check      ends with 1 if a page is not what the figures say
python docs/figures.py --measure    measures all figures on this machine first: some minutes, without other work on it;
                                    those of scaling.md by ``python -m tests.bench.scaling``
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from hpcdist.cli import web_page
from hpcdist.cli.bench import plots, report
from hpcdist.cli.bench.timing import Figure
from hpcdist.core.printing import format_size, format_time

DOCS = Path(__file__).parent
FOLDER = DOCS / "explanation"
FIGURES = FOLDER / "figures"
PAGES = {  # -> its way here
    DOCS / "explanation" / "performance.md": "",
    DOCS / "explanation" / "scaling.md": "",
    DOCS.parent / "README.md": "docs/explanation/",
}
BEGIN, END = "<!-- {} written by docs/figures.py: from here -->", "<!-- {} to here -->"
BENCH = {  # file of figures -> what `mpirun -n 2 python -m hpcdist bench` is given
    "all_reduce": ["--max", "64M", "--dtypes", "float32", "bfloat16"],
    "torch": ["torch"],
}
RANKS = (1, 2, 4, 8)
REPEATS = 3
MIB = 1 << 20
STEPS = {  # row of "torch" -> its name on the pages
    "DDP step": "a step of DDP, 10 million parameters",
    "FSDP2 step": "a step of FSDP2, the same, gradients clipped",
    "DTensor redistribute": "DTensor, 256 KiB: rows to whole to columns to rows",
    "tensor-parallel block": "tensor parallel, two layers",
    "pipeline step": "pipeline, 4 microbatches",
}
COUNTED = {  # step of tests/bench/scaling_job.py -> its name on the page, and its color
    "init_process_group": ("`init_process_group`", "side0"),
    "init_device_mesh": ("`init_device_mesh`, of one dimension on 2 ranks, else of two", "side1"),
    "new_group of all": ("`new_group` of all, or `new_subgroups(2)`", "side2"),
    "broadcast_object_list, 100 B": ("`broadcast_object_list`, 100 B", "side3"),
    "all_gather_object, 100 B": ("`all_gather_object`, 100 B a rank", "side4"),
}
IMPORT, GROUP, MPI = "import torch, hpcdist", "init_process_group", "MPI_Init"


# -- measuring --------------------------------------------------------------------------------------------------


def measure() -> None:
    """Measure everything on this machine."""
    mpirun = Path(sys.executable).with_name("mpirun")
    for name, options in BENCH.items():
        command = [mpirun, "-n", "2", sys.executable, "-m", "hpcdist", "bench", *options]
        subprocess.run([*command, "--json", FIGURES / f"{name}.json"], check=True)
    tolerant = ["--oversubscribe"] if "Open MPI" in load("torch")["mpi"] else []
    program = DOCS.parent / "tests" / "bench" / "start.py"
    rows = []
    for ranks in RANKS:
        seconds: dict[str, list[float]] = {}
        for kind in (["mpi"], []) * REPEATS:
            command = [mpirun, *tolerant, "-n", str(ranks), sys.executable, program, *kind]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            for step, taken in json.loads(done.stdout).items():
                seconds.setdefault(step, []).append(taken)
        median = {step: statistics.median(taken) for step, taken in seconds.items()}
        imports = median["import torch"] + median["import hpcdist"]
        rows.append({"ranks": ranks, IMPORT: imports, GROUP: median[GROUP], MPI: median[MPI]})
    about = {"command": "mpirun -n N python tests/bench/start.py", "mpi": load("torch")["mpi"], "rows": rows}
    about["machine"] = {**report.machine(), "date": str(date.today())}
    (FIGURES / "start.json").write_text(json.dumps(about, indent=1) + "\n")


def load(name: str) -> dict[str, Any]:
    """Read a file of figures."""
    return json.loads((FIGURES / f"{name}.json").read_text())


def figures(name: str) -> list[Figure]:
    """Read the figures of a run of ``bench``."""
    return [Figure(**each) for each in load(name)["figures"]]


# -- what the pages say -----------------------------------------------------------------------------------------


def place(name: str) -> str:
    """Say where a run was measured."""
    run = load(name)
    machine = run["machine"]
    return f"{run['ranks']} ranks on a machine of {machine['cores']} cores ({machine['cpu']}), {run['mpi']}"


def beside_gloo() -> list[tuple[str, str, dict[str, float]]]:
    """Return the rows beside gloo: name in the plot, name in a table, and side -> microseconds."""
    calls = report.by_call(figures("all_reduce"))
    rows = [
        (f"all_reduce {dtype}", f"`all_reduce`, 16 MiB {dtype}", calls["all_reduce", dtype, 16 * MIB])
        for dtype in ("float32", "bfloat16")
    ]
    steps = {what: found for (what, _, _), found in report.by_call(figures("torch")).items()}
    rows += [(what, name, steps[what]) for what, name in STEPS.items()]
    return [(short, name, {side: each.median for side, each in found.items()}) for short, name, found in rows]


def milliseconds(microseconds: float | None) -> str:
    """Write a time of the tables."""
    return "–" if microseconds is None else f"{microseconds / 1e3:.3g} ms"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table, as Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0].replace("|  |", "| |"), "|---" * len(head) + "|", *lines[1:]])


def gloo_block(way: str) -> str:
    """Return what the page says beside gloo."""
    commands = " and ".join(f"`mpirun -n 2 python -m hpcdist bench {' '.join(options)}`" for options in BENCH.values())
    rows = [
        [name, milliseconds(found["hpcdist"]), milliseconds(found["gloo"]), f"{found['hpcdist'] / found['gloo']:.2f}"]
        for _, name, found in beside_gloo()
    ]
    return (
        f"![Time on hpcdist as a part of the time on gloo]({way}beside_gloo.svg)\n\n{commands}, {place('torch')}:\n\n"
        + table(["", "hpcdist", "torch's gloo", "of gloo's time"], rows)
    )


def sizes() -> list[Figure]:
    """Return the figures of all_reduce of float32 over the sizes."""
    return [each for each in figures("all_reduce") if each.dtype == "float32"]


def mpi_block(way: str) -> str:
    """Return what the page says beside raw MPI."""
    plot = f"![Time of all_reduce over size, beside gloo, MPI and a memory copy]({way}all_reduce.svg)"
    rows = []
    for (_, _, nbytes), found in list(report.by_call(sizes()).items())[::2]:  # the plot has them all
        ours, raw = found["hpcdist"].median, found["mpi4py"].median
        times = [format_time(time / 1e6) for time in (ours, raw)]
        rows.append([format_size(nbytes), *times, f"{ours / raw:.2f}"])
    command = f"`mpirun -n 2 python -m hpcdist bench {' '.join(BENCH['all_reduce'])}`, {place('all_reduce')}:"
    head = ["`all_reduce` of float32", "hpcdist", "MPI by mpi4py", "of MPI's time"]
    return f"{plot}\n\n{command}\n\n{table(head, rows)}"


def start_block(way: str) -> str:
    """Return what the page says about the start."""
    run = load("start")
    rows = [["`import torch, hpcdist`"], ["`init_process_group`"], ["raw `MPI_Init` in its place"]]
    for line, step in zip(rows, (IMPORT, GROUP, MPI), strict=True):
        line += [f"{each[step]:.3g}" for each in run["rows"]]
    machine = run["machine"]
    where = f"{machine['cores']} cores ({machine['cpu']}), {run['mpi']}; the slowest rank, in seconds"
    return f"![Seconds until the ranks have a group]({way}start.svg)\n\n`{run['command']}`, {where}:\n\n" + table(
        ["", *map(ranks_of, run["rows"])], rows
    )


def ranks_of(row: dict[str, Any]) -> str:
    """Name a column of the start."""
    return f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"


def counts() -> dict[str, dict[int, dict[str, Any]]]:
    """Return what was counted on N ranks: step -> N -> name -> rank 0's figure and the most of any rank."""
    steps: dict[str, dict[int, dict[str, Any]]] = {}
    for row in load("scaling")["rows"]:
        steps.setdefault(row["step"], {})[row["ranks"]] = row
    return steps


def scaling_block(way: str) -> str:
    """Return what the page says of N ranks."""
    found = counts()
    ranks = [f"{each}" for each in found["hang"]]
    plot = f"![Messages of a rank over the number of ranks]({way}scaling.svg)"

    def rows(name: str, steps: dict[str, str], index: int = 1) -> list[list[str]]:
        return [[title, *(f"{each[name][index]:,}" for each in found[step].values())] for step, title in steps.items()]

    def counted(what: str, lines: list[list[str]]) -> str:
        return table([f"{what}", f"{ranks[0]} ranks", *ranks[1:]], lines)

    named = {step: title for step, (title, _) in COUNTED.items()}
    rest = next(step for step in found if step.startswith("rest of"))
    hang = [
        *rows("datagrams", {rest: f"in {rest.removeprefix('rest of ')} at rest"}),
        *rows("datagrams", {"hang": "a collective that one rank has not entered: rank 0"}, 0),
        *rows("datagrams", {"hang": "… the rank that sends most, which relays"}),
    ]
    kept = {step: named[step] for step in ("init_process_group", "new_group of all")}
    machine = load("scaling")["machine"]
    return "\n\n".join([
        plot,
        f"{machine['cores']} cores ({machine['cpu']}), {load('start')['mpi']}:",
        counted("messages of a rank, at most", rows("messages", named)),
        counted("bytes of a rank, at most", rows("bytes", named)),
        counted("datagrams of a rank", hang),
        counted("memory that a rank keeps for itself, kB", rows("kilobytes", kept)),
    ])  # fmt: skip


def first_rows(way: str) -> str:
    """Return what the README says first."""
    rows = [
        [name, *(milliseconds(found.get(side)) for side in ("hpcdist", "gloo", "mpi4py"))]
        for _, name, found in beside_gloo()[:3]
    ]
    plot = gloo_block(way).splitlines()[0]
    how = f"`python -m hpcdist bench`, [with its options]({way}performance.md)"
    head = f"Measured by {how}, with {place('torch')}:"
    return f"{head}\n\n{table(['', 'hpcdist', 'gloo', 'MPI by mpi4py'], rows)}\n\n{plot}"


BLOCKS: dict[str, Callable[[str], str]] = {
    "gloo": gloo_block,
    "MPI": mpi_block,
    "start": start_block,
    "scaling": scaling_block,
    "first rows": first_rows,
}


def filled(text: str, way: str) -> str:
    """Return a page with what the figures say now; ``way`` leads from it to the plots."""
    for name, block in BLOCKS.items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{block(way)}\n{end}{rest.partition(end)[2]}"
    return text


# -- plots ------------------------------------------------------------------------------------------------------


def draw_gloo(axes: Any) -> None:
    """Draw how much of gloo's time each row takes."""
    rows = beside_gloo()
    parts = [found["hpcdist"] / found["gloo"] for _, _, found in rows]
    names = [short for short, _, _ in rows]
    axes.barh(names, [1.0] * len(rows), color=plots.DRAWN["line"], height=0.7, label="gloo")
    axes.barh(names, parts, color=plots.DRAWN["side0"], height=0.7, label="hpcdist")
    for index, (_, _, found) in enumerate(rows):
        text = f"{found['hpcdist'] / 1e3:.3g} of {milliseconds(found['gloo'])}"
        axes.annotate(text, (max(1.0, parts[index]), index), (4, 0), textcoords="offset points", va="center")
    plots.only_bars(axes)
    axes.set_xlim(0, 1.65)
    axes.figure.legend(*(each[::-1] for each in axes.get_legend_handles_labels()), loc="outside upper left", ncols=2)


def draw_start(axes: Any) -> None:
    """Draw the seconds of the start, by steps."""
    rows = load("start")["rows"]
    names = [ranks_of(row) for row in rows]
    steps = {step: ([row[step] for row in rows], color) for step, color in ((IMPORT, "side3"), (GROUP, "side0"))}
    left = [0.0] * len(rows)
    for step, (seconds, color) in steps.items():
        bars = axes.barh(names, seconds, left=left, color=plots.DRAWN[color], height=0.7, label=step)
        left = [before + more for before, more in zip(left, seconds, strict=True)]
    axes.bar_label(bars, [f"{sum_:.3g} s" for sum_ in left], padding=4)
    plots.only_bars(axes)
    axes.figure.legend(loc="outside upper left", ncols=2, columnspacing=1.2)


def draw_scaling(axes: Any) -> None:
    """Draw the messages that a rank sends in each step, over the number of ranks."""
    found = counts()
    for (step, (_, color)), marker in zip(COUNTED.items(), plots.MARKERS, strict=False):
        ranks = list(found[step])
        sent = [each["messages"][1] for each in found[step].values()]
        axes.plot(ranks, sent, color=plots.DRAWN[color], marker=marker, markersize=4, label=step.partition(",")[0])
    axes.set(xscale="log", xlabel="ranks", ylabel="messages of a rank")
    axes.set_ylim(0)
    axes.set_xticks(ranks, [f"{each}" for each in ranks])
    axes.minorticks_off()
    axes.grid(linewidth=0.6)
    axes.figure.legend(loc="outside upper left", ncols=2, columnspacing=1.2, handletextpad=0.4)


def draw() -> None:
    """Write the plots."""
    drawn = {
        "all_reduce": plots.plot(sizes()),
        "beside_gloo": plots.svg(3.0, draw_gloo),
        "start": plots.svg(2.1, draw_start),
        "scaling": plots.svg(plots.HEIGHT, draw_scaling),
    }
    style = f"<style>{web_page.stylesheet()} svg {{ background: var(--paper); }}</style>"
    for name, svg in drawn.items():
        (FOLDER / f"{name}.svg").write_text(svg.replace(">", f">{style}", 1))


def main() -> int:
    """Measure, draw and write, or check."""
    if "--check" in sys.argv:
        return int(any(filled(page.read_text(), way) != page.read_text() for page, way in PAGES.items()))
    if "--measure" in sys.argv:
        measure()
    draw()
    for page, way in PAGES.items():
        page.write_text(filled(page.read_text(), way))
    return 0


if __name__ == "__main__":
    sys.exit(main())
