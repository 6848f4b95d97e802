"""The doctor's page: the merged findings of all ranks, as text, as JSON and for the browser."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from datetime import datetime
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

import hpcdist
from hpcdist.cli import web_page
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.core.ranks import format_count

Chapters = dict[str, list[Finding]]
MARKS = {OK: ("✓", "green"), NOTE: ("·", "dim"), ADVICE: ("!", "yellow"), PROBLEM: ("✗", "bold red")}
IN_ASCII = str.maketrans("✓·✗", "+.x")


def count(chapters: Chapters, level: str) -> int:
    return sum(finding.level == level for findings in chapters.values() for finding in findings)


def write_json(chapters: Chapters, ranks: list[Facts]) -> None:
    findings = [{"topic": title, **finding._asdict()} for title, findings in chapters.items() for finding in findings]
    verdict = "wrong" if count(chapters, PROBLEM) else "ok"
    print(json.dumps({"verdict": verdict, "findings": findings, "ranks": ranks}, indent=1, default=str))


def write(chapters: Chapters, size: int) -> None:
    width = None if sys.stdout.isatty() else shutil.get_terminal_size((110, 0)).columns
    console = Console(width=width, highlight=False, soft_wrap=False)
    marks = MARKS
    if console.options.ascii_only:
        marks = {level: (mark.translate(IN_ASCII), style) for level, (mark, style) in MARKS.items()}
    console.rule(f"hpcdist doctor, {format_count(size, 'rank')}")
    for title, findings in chapters.items():
        console.print(f"\n[bold]{title}[/bold]")
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(overflow="fold")
        for finding in findings:
            mark, style = marks[finding.level]
            table.add_row(Text(mark, style), Text(finding.text, "dim" if finding.level == NOTE else ""))
            if finding.remedy and finding.level == NOTE:
                table.add_row("", Text(f"  {finding.remedy}", "dim"))
        console.print(table)
    if wanted := to_fix(chapters):
        console.print("\n[bold]What to do[/bold]")
    for finding in wanted:
        mark, style = marks[finding.level]
        console.print(Text(f"{mark} {finding.text}", style))
        # commands will be copied: they are never wrapped
        console.print(Text(f"    {finding.remedy or 'no fix is known'}"), soft_wrap=True)
    console.print()
    console.rule(Text(verdict(chapters), "bold red" if count(chapters, PROBLEM) else "green"))


def to_fix(chapters: Chapters) -> list[Finding]:
    """Return the problems, and then the advice."""
    found = [finding for findings in chapters.values() for finding in findings]
    return [finding for level in (PROBLEM, ADVICE) for finding in found if finding.level == level]


def verdict(chapters: Chapters) -> str:
    return f"{count(chapters, PROBLEM)} wrong, {count(chapters, ADVICE)} that could be better"


def write_html(chapters: Chapters, size: int, path: str) -> None:
    def items(findings: list[Finding], level: str | None = None) -> str:
        lines = [
            f'<li class="{each.level}"><b>{MARKS[each.level][0]}</b>{escape(each.text)}'
            + (f"<pre>{escape(each.remedy)}</pre>" if each.remedy and level in (None, each.level) else "")
            for each in findings
        ]
        return "\n".join(["<ul>", *lines, "</ul>"])

    ranks, version = format_count(size, "rank"), hpcdist.__version__
    place = f"{ranks}, {platform.node()}, hpcdist {version}, {datetime.now():%Y-%m-%d %H:%M}"
    wanted = to_fix(chapters)
    web_page.write(
        path,
        "hpcdist doctor",
        [
            f"<p>{escape(verdict(chapters))}; {escape(place)}</p>",
            *([web_page.section("What to do", items(wanted))] if wanted else []),
            *(web_page.section(title, items(findings, NOTE)) for title, findings in chapters.items()),
        ],
    )
