"""Writes the tables of reductions and of torch's releases in reference/support.md from the code's own tables.

python docs/support_table.py            writes it
python docs/support_table.py --check    ends with 1 where the page is not what the code says
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpcdist.core.reduction import ALL_OPS, KIND_OF, KINDS, WIDE, name_of
from hpcdist.torch_bridge.features import FEATURES

PAGE = Path(__file__).parent / "reference" / "support.md"
BEGIN, END = "<!-- {}, written by docs/support_table.py: from here -->", "<!-- to here -->"


def reductions() -> str:
    """Return the table of reductions, a row a dtype and a column an op."""
    names = [name_of(op) for op in ALL_OPS]
    lines = [
        f"| dtype | {' | '.join(names)} | combined in |",
        f"|---|{':-:|' * len(names)}---|",
    ]
    for dtype, kind in KIND_OF.items():
        ops = {name_of(op) for op in KINDS[kind]}
        cells = " | ".join("✓" if name in ops else "–" for name in names)
        wide = str(WIDE.get(dtype, dtype)).removeprefix("torch.")
        lines.append(f"| `{str(dtype).removeprefix('torch.')}` | {cells} | {wide} |")
    return "\n".join(lines)


def features() -> str:
    """Return the table of what differs among the supported releases of torch."""
    lines = ["| of torch | since | until | in hpcdist |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {each.since or ''} | {each.until or ''} | {each.consequence} |" for name, each in FEATURES.items()
    ]
    return "\n".join(lines)


TABLES = {"reductions": reductions, "features": features}


def filled(page: str) -> str:
    """Return the page with the tables that the code has now."""
    for name, table in TABLES.items():
        before, begin, rest = page.partition(BEGIN.format(name))
        _, _, after = rest.partition(END)
        page = f"{before}{begin}\n{table()}\n{END}{after}"
    return page


def main() -> int:
    """Write or check."""
    text = PAGE.read_text()
    if "--check" in sys.argv:
        return int(filled(text) != text)
    PAGE.write_text(filled(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
