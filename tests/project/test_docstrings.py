"""Docstrings of modules: each module has one, and its first line says what the module is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    path
    for folder in ("src", "tests", "slurm", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_build" not in path.parts
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_opens_with_what_it_is(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()))
    if text is None:
        assert path.name == "__init__.py"
        assert not path.is_relative_to(ROOT / "src")
        assert not path.read_text().strip()
        return
    first, *rest = text.splitlines()
    assert "?" not in first
    assert not rest or not rest[0]
