"""The figures as a page for the browser: a plot of each call and its table.

A call that was timed at several sizes is drawn as time over size, another one as a bar for each side.
"""

from __future__ import annotations

import io
import platform
import shlex
import sys
from collections.abc import Callable
from datetime import date
from html import escape
from typing import Any

import hpcdist as dist
from hpcdist.cli import web_page
from hpcdist.cli.bench import report
from hpcdist.cli.bench.timing import Bench, Figure
from hpcdist.core.printing import format_size, format_time, unit_of

MISSING = "--html needs matplotlib: pip install 'hpcdist[plot]'"
SIDES = [name for name in web_page.COLORS if name.startswith("side")]
MARKERS = "os^Dvx"
# matplotlib does not know CSS variables: each color is drawn as a unique value, which is replaced afterwards
DRAWN = {name: f"#0{index:02x}0a5" for index, name in enumerate(web_page.COLORS)}
SETTINGS: Any = {  # whose keys matplotlib types as literals
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hpcdist",  # the same figures make the same file
    "text.color": DRAWN["ink"],
    "axes.labelcolor": DRAWN["ink"],
    "axes.edgecolor": DRAWN["faint"],
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": DRAWN["line"],
    "legend.frameon": False,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    **{
        f"{axis}tick.{part}": DRAWN[name] for axis in "xy" for part, name in (("color", "faint"), ("labelcolor", "ink"))
    },
}
WIDTH = 4.6  # inches: on a telephone the plot is as wide as the screen, and still legible
HEIGHT = 3.3
BAR = 0.3
MOST_TICKS = 7


def svg(height: float, draw: Callable[[Any], None]) -> str:
    """Return a plot as an SVG element, whose colors are variables of ``web_page.stylesheet()``.

    ``draw`` is called with matplotlib's axes and uses the colors of ``DRAWN``; the height is in inches.
    """
    import matplotlib  # type: ignore[import-not-found,unused-ignore]  # the extra hpcdist[plot]
    from matplotlib.figure import Figure as Drawing  # type: ignore[import-not-found,unused-ignore]

    with matplotlib.rc_context(SETTINGS):
        drawing = Drawing(figsize=(WIDTH, height))
        draw(drawing.subplots())
        file = io.StringIO()
        drawing.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    for name, drawn in DRAWN.items():
        text = text.replace(drawn, f"var(--{name})")
    return text[text.index("<svg") :]


def plot(figures: list[Figure], sides: list[str] | None = None) -> str:
    """Return the plot of one call and dtype at one size or at several, as an SVG element.

    ``sides`` are all sides of the page, which decide the colors; by default those of the figures.
    """
    by_side: dict[str, list[Figure]] = {}
    for figure in figures:
        by_side.setdefault(figure.side, []).append(figure)
    order = sides or list(by_side)
    styles = {side: (DRAWN[SIDES[i % len(SIDES)]], MARKERS[i % len(MARKERS)]) for i, side in enumerate(order)}
    if len({figure.nbytes for figure in figures}) > 1:
        return svg(HEIGHT, lambda axes: draw_lines(axes, by_side, styles))
    return svg(BAR * (len(by_side) + 1), lambda axes: draw_bars(axes, by_side, styles))


def draw_lines(axes: Any, by_side: dict[str, list[Figure]], styles: dict[str, tuple[str, str]]) -> None:
    """Draw time over size, a line for each side in the band of its rounds."""
    for side, points in by_side.items():
        color, marker = styles[side]
        sizes = [each.nbytes for each in points]
        axes.plot(sizes, [each.median for each in points], color=color, marker=marker, markersize=4, label=side)
        lows, highs = [each.low for each in points], [each.high for each in points]
        axes.fill_between(sizes, lows, highs, color=color, alpha=0.2, linewidth=0)
    axes.set(xscale="log", yscale="log", ylabel="time of a call")
    axes.grid(linewidth=0.6)
    sizes = sorted({each.nbytes for points in by_side.values() for each in points})
    shown = sizes[:: -(-len(sizes) // MOST_TICKS)]
    axes.set_xticks(shown, [format_size(size) for size in shown])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: format_time(value / 1e6))
    axes.figure.legend(loc="outside upper left", ncols=4, columnspacing=1.2, handletextpad=0.4)


def draw_bars(axes: Any, by_side: dict[str, list[Figure]], styles: dict[str, tuple[str, str]]) -> None:
    medians = [points[0].median for points in by_side.values()]
    bars = axes.barh(list(by_side), medians, color=[styles[side][0] for side in by_side], height=0.7)
    axes.bar_label(bars, [format_time(median / 1e6) for median in medians], padding=4)
    only_bars(axes)


def only_bars(axes: Any) -> None:
    """Remove the axes, which bars with numbers do not need."""
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)


def parts(figures: list[Figure]) -> list[str]:
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        groups.setdefault((figure.what, figure.dtype), []).append(figure)
    sides = list(dict.fromkeys(figure.side for figure in figures))
    return [
        web_page.section(" ".join(call).strip(), f'<div class="beside">{plot(mine, sides)}{table(mine)}</div>')
        for call, mine in groups.items()
    ]


def table(figures: list[Figure]) -> str:
    """Return the table beside a plot, with the rows of one call."""
    sides, rivals, rows = report.comparison(figures, cell, ".3g")
    return web_page.table(["size", *sides, *(f"of {side}" for side in rivals)], (row[2:] for row in rows))


def cell(figure: Figure) -> str:
    unit = unit_of(figure.median / 1e6)[0] * 1e6
    return f"{format_time(figure.median / 1e6)}<br><small>{figure.low / unit:.3g}–{figure.high / unit:.3g}</small>"


def write(bench: Bench) -> None:
    if bench.rank or not bench.options.html or not bench.figures:
        return
    found = report.machine()
    nodes = f" on {bench.wire.nodes} nodes" if bench.wire.nodes > 1 else ""
    about = [
        f"{bench.size} ranks{nodes}, {bench.library}, hpcdist {dist.__version__}, torch {found['torch']}, "
        f"Python {found['python']}",
        f"{platform.node()}: {found['cores']} cores, {found['cpu']}; {date.today()}",
    ]
    command = shlex.join(["python", "-m", "hpcdist", *sys.argv[1:]])
    web_page.write(
        bench.options.html,
        "hpcdist bench",
        [
            *(f"<p>{escape(line)}</p>" for line in about),
            f"<pre>{escape(command)}</pre>",
            '<p class="aside">Each rank ran this command. Medians of the rounds, and below them the lowest and the '
            "highest round; the slowest rank counts. The last columns have hpcdist's time over the side's.</p>",
            *parts(bench.figures),
        ],
    )
