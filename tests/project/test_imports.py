"""Does every import point down? Which part of the package may import which others."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

ENVIRONMENT = "hpcdist.launch.environment"  # which rank am I: reads variables, imports nothing of ours

# part -> the parts it may import, itself aside; a part is the longest name here that a module's begins with
MAY_IMPORT: dict[str, set[str]] = {
    "hpcdist": {"hpcdist.c10d", "hpcdist.core", "hpcdist.launch", "hpcdist.watch", "hpcdist.torch_bridge", "stores"},
    "hpcdist.__main__": {"hpcdist.cli"},
    "hpcdist.c10d": {"hpcdist.core", "hpcdist.launch", ENVIRONMENT, "hpcdist.watch", "hpcdist.torch_bridge", "stores"},
    "hpcdist.torch_bridge": {"hpcdist.core", "hpcdist.launch", ENVIRONMENT},
    "hpcdist.watch": {"hpcdist.core", ENVIRONMENT, "stores"},
    "hpcdist.launch": {"hpcdist.core", ENVIRONMENT, "stores"},
    ENVIRONMENT: set(),
    "hpcdist.core": set(),
    "hpcdist.backends": {"hpcdist.core", ENVIRONMENT, "hpcdist.backends.foreign"},
    "hpcdist.backends.foreign": {"hpcdist.core", "hpcdist.torch_bridge"},  # its library is torch.distributed
    "stores": set(),
    "hpcdist.autoload": {"hpcdist", "hpcdist.c10d", "hpcdist.torch_bridge"},  # inside functions, when it is asked for
}
MAY_IMPORT["hpcdist.cli"] = {*MAY_IMPORT, "hpcdist.backends"} - {"hpcdist.__main__"}

# module -> what it imports all the same, inside a function, and why
EXCEPTIONS = {
    "hpcdist.core.registry": "hpcdist.backends.foreign",  # the only place that knows backends, each by its name
    "hpcdist.c10d.names": "hpcdist.backends.mpi.runtime",  # is there an MPI? without starting it
    "hpcdist.c10d.lifecycle": "hpcdist.backends.mpi.runtime",  # the user's communicator is checked, the world started
    "hpcdist.c10d.adoption": "hpcdist.backends.mpi.runtime",  # the same, for torch's init_process_group
    "hpcdist.c10d.dist2": "hpcdist.backends.mpi.runtime",  # the same, for torch's dist2
    "hpcdist.launch.rendezvous": "hpcdist.backends.mpi.runtime",  # mpi:// tells the store's address over MPI
    "hpcdist.backends.nccl.bootstrap": "hpcdist.launch.devices",  # which GPU is this rank's
    "hpcdist.backends.nccl.communicators": "hpcdist.launch.devices",  # the variable that lets ranks share one
}
WHERE_MPI_IS = ("hpcdist.backends.mpi", "hpcdist.launch", "hpcdist.cli")
# one module of each of these imports no other's: mpi, nccl, loopback, and gloo with what carries c10d's own
FAMILIES = {"gloo": "foreign"}


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                file = SRC.joinpath(*full.split("."))
                is_module = file.is_dir() or file.with_suffix(".py").exists()
                yield full if is_module else node.module


def part_of(module: str) -> str:
    return max((part for part in MAY_IMPORT if f"{module}.".startswith(f"{part}.")), key=len)


FILES = {module_of(path): path for path in sorted(SRC.rglob("*.py"))}


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    part = part_of(module)
    for imported in imports(FILES[module]):
        root = imported.split(".")[0]
        if root in ("hpcdist", "stores"):
            allowed = part_of(imported) in MAY_IMPORT[part] | {part} or imported == EXCEPTIONS.get(module)
            assert allowed, f"{module} imports {imported}"
        if root == "mpi4py":
            assert module.startswith(WHERE_MPI_IS), f"{module} imports mpi4py"


@pytest.mark.parametrize("module", [module for module in FILES if module.startswith("hpcdist.backends.")])
def test_backends_import_no_other_backend(module):
    def family(name):
        own = name.split(".")[2]
        return FAMILIES.get(own, own)

    for imported in imports(FILES[module]):
        if imported.startswith("hpcdist.backends."):
            assert family(imported) == family(module), f"{module} imports {imported}"


def test_import_torch_loads_the_standard_library_alone():
    code = ast.parse((SRC / "hpcdist" / "autoload.py").read_text())
    found = {getattr(node, "module", None) or node.names[0].name for node in code.body if hasattr(node, "names")}
    assert {name.split(".")[0] for name in found} <= sys.stdlib_module_names


def test_the_store_server_needs_the_standard_library_alone():
    for name in ("tcp_server", "tcp_session", "tcp_space", "tcp_requests", "tcp_wire", "tcp_frames"):
        found = {imported.split(".")[0] for imported in imports(SRC / "stores" / f"{name}.py")}
        assert not found & {"torch", "numpy", "mpi4py", "hpcdist"}, name
