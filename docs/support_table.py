"""Writes the table of reductions in reference/support.md from the code's own tables.

python docs/support_table.py            writes it
python docs/support_table.py --check    ends with 1 where the page is not what the code says
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpcdist.core.reduction import ALL_OPS, KIND_OF, KINDS, WIDE, name_of

PAGE = Path(__file__).parent / "reference" / "support.md"
BEGIN, END = "<!-- written by docs/support_table.py: from here -->", "<!-- to here -->"


def table() -> str:
    """Return the table, a row a dtype and a column an op."""
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


def filled(page: str) -> str:
    """Return the page with the table that the code has now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """Write or check."""
    text = PAGE.read_text()
    if "--check" in sys.argv:
        return int(filled(text) != text)
    PAGE.write_text(filled(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
