"""The tables in docs/reference/support.md agree with the code."""

import importlib.util
from pathlib import Path

import torch

from hpcdist.core import reduction

DOCS = Path(__file__).parents[2] / "docs"


def script():
    spec = importlib.util.spec_from_file_location("support_table", DOCS / "support_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_the_code():
    page = (DOCS / "reference" / "support.md").read_text()
    assert script().filled(page) == page, "run: python docs/support_table.py"


def test_every_dtype_that_reduces_has_a_row():
    lines = [line for line in script().reductions().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == [str(d).removeprefix("torch.") for d in reduction.KIND_OF]
    row = next(line for line in lines if "`complex64`" in line).split("|")
    heads = [cell.strip() for cell in script().reductions().splitlines()[0].split("|")]
    cells = dict(zip(heads, (cell.strip() for cell in row), strict=True))
    assert (cells["SUM"], cells["MAX"], cells["BAND"]) == ("✓", "–", "–")


def test_a_changed_table_is_noticed(monkeypatch):
    page = (DOCS / "reference" / "support.md").read_text()
    monkeypatch.setitem(reduction.KIND_OF, torch.float64, "integer")
    assert script().filled(page) != page
