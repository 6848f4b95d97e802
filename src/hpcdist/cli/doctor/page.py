"""The doctor's page: the merged findings of all ranks, as text or JSON."""

from __future__ import annotations

import json
import os
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcdist.cli.doctor.findings import ADVICE, LEVELS, NOTE, OK, PROBLEM, Facts, Finding

Chapters = dict[str, list[Finding]]
MARKS = {OK: ("✓", "green"), NOTE: ("·", "dim"), ADVICE: ("!", "yellow"), PROBLEM: ("✗", "bold red")}


def count(chapters: Chapters, level: str) -> int:
    """Return how many findings are of a level."""
    return sum(finding.level == level for findings in chapters.values() for finding in findings)


def write_json(chapters: Chapters, ranks: list[Facts]) -> None:
    """Print findings and facts as one JSON object."""
    findings = [{"topic": title, **finding._asdict()} for title, findings in chapters.items() for finding in findings]
    verdict = "wrong" if count(chapters, PROBLEM) else "ok"
    print(json.dumps({"verdict": verdict, "findings": findings, "ranks": ranks}, indent=1, default=str))


def write(chapters: Chapters, size: int) -> None:
    """Print the page: a chapter for each topic, then the commands that fix what is wrong."""
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "110"))
    console = Console(width=width, highlight=False, soft_wrap=False)
    console.rule(f"hpcdist doctor, {size} rank{'s' if size > 1 else ''}")
    for title, findings in chapters.items():
        console.print(f"\n[bold]{title}[/bold]")
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(overflow="fold")
        for finding in findings:
            mark, style = MARKS[finding.level]
            table.add_row(Text(mark, style), Text(finding.text, "dim" if finding.level == NOTE else ""))
            if finding.mend and finding.level == NOTE:
                table.add_row("", Text(f"  {finding.mend}", "dim"))
        console.print(table)
    wanted = [
        finding
        for level in (PROBLEM, ADVICE)
        for findings in chapters.values()
        for finding in findings
        if finding.level == level
    ]
    if wanted:
        console.print("\n[bold]What to do[/bold]")
    for finding in wanted:
        mark, style = MARKS[finding.level]
        console.print(Text(f"{mark} {finding.text}", style))
        # commands are meant to be copied: they are never wrapped
        console.print(Text(f"    {finding.mend or 'no fix is known'}"), soft_wrap=True)
    problems, advice = count(chapters, PROBLEM), count(chapters, ADVICE)
    console.print()
    style = "bold red" if problems else "green"
    console.rule(Text(f"{problems} wrong, {advice} that could be better", style))


assert set(MARKS) == set(LEVELS)
