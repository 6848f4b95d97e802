"""mpi4py's object reductions, which hold the GIL while they duplicate the communicator, are not used on threads."""

import ast
from pathlib import Path

import pytest

import hpcdist

PACKAGE = Path(hpcdist.__file__).parent
PARTS = ("backends/mpi", "launch", "watch")  # what may run on several threads of a rank
REDUCTIONS = {"allreduce", "scan", "exscan"}  # ``reduce`` is a name of others too


@pytest.mark.parametrize("part", PARTS)
def test_no_object_reduction(part):
    called = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted((PACKAGE / part).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REDUCTIONS
    ]
    assert not called, f"use allgather: {called}"
