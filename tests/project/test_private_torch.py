"""Private names of torch: used only in the bridges, which list them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SRC = Path(__file__).parents[2] / "src"
BRIDGES = sorted((SRC / "hpcdist" / "torch_bridge").glob("*.py"))
OTHERS = [path for path in sorted(SRC.rglob("*.py")) if path not in BRIDGES]
# what an object of torch may have that no name of the file leads to
OBJECTS = (dist.Work, dist.ProcessGroup, dist.Store, dist.ProcessGroupGloo, dist.Backend, dist.DeviceMesh, torch.Tensor)


def is_private(name: str) -> bool:
    return any(re.match("_[^_]", part) for part in name.split("."))


def dotted(node: ast.AST) -> str:
    """Return an attribute's whole name as it stands in the code; what is no name, such as a call, stands as a dot."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_names(code: str) -> Iterator[str]:
    """Yield every private name of torch that a file imports, reaches through an import, or asks an object for."""
    tree = ast.parse(code)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                if full.split(".")[0] == "torch":
                    imported[alias.asname or full.rpartition(".")[2]] = full
                    if isinstance(node, ast.Import) and alias.asname is None:
                        imported["torch"] = "torch"
    yield from filter(is_private, imported.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root, _, rest = dotted(node).partition(".")
            on_torch = root in imported
            on_an_object = root not in ("self", "cls") and any(hasattr(each, node.attr) for each in OBJECTS)
            if on_torch or on_an_object:
                yield f"{imported.get(root, root)}.{rest}"


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(SRC)))
def test_private_names_are_used_in_the_bridges_alone(path):
    assert list(private_names(path.read_text())) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from torch._C._distributed_c10d import Store", "torch._C._distributed_c10d.Store"),
        ("import torch._C as c", "torch._C"),
        ("import torch\ntorch._C.f()", "torch._C"),
        ("import torch.distributed as d\nd.distributed_c10d._world", "torch.distributed.distributed_c10d._world"),
        ("def f(work): return work._source_rank()", "work._source_rank"),
        ("from torch.distributed import Store", None),
        ("class A:\n    def f(self): return self._source_rank", None),
        ("import collections\ncollections._other", None),
    ],
)
def test_the_search_finds_what_it_should(code, found):
    assert list(private_names(code)) == ([found] if found else [])


@pytest.mark.parametrize("bridge", BRIDGES, ids=lambda path: path.name)
def test_a_bridge_lists_each_name(bridge):
    code = bridge.read_text()
    table = ast.get_docstring(ast.parse(code))
    for name in private_names(code):
        last = next(part for part in reversed(name.split(".")) if is_private(part))
        assert last in table, f"{name} is not in the bridge's table"
