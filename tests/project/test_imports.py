"""The direction of imports, checked on the parsed source: down only and without circles, also through other modules."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

ENVIRONMENT = "hpcdist.launch.environment"  # which rank am I: reads variables, imports nothing of ours
PMI = "hpcdist.launch.pmi"  # messages to the launcher's server
ADDRESSES = "hpcdist.launch.addresses"  # this host's addresses: asks the kernel, imports nothing of ours

# part -> the parts it may import, itself aside; a part is the longest name here that a module's begins with
MAY_IMPORT: dict[str, set[str]] = {
    "hpcdist": {"hpcdist.public"},
    "hpcdist.public": {
        *("hpcdist.beyond", "hpcdist.c10d", "hpcdist.dist2", "hpcdist.core", "hpcdist.launch", "hpcdist.torch_bridge"),
        "hpcdist_stores",
    },
    "hpcdist.beyond": {"hpcdist.c10d", "hpcdist.core", "hpcdist.watch", "hpcdist.torch_bridge", ENVIRONMENT},
    "hpcdist.dist2": {"hpcdist.c10d"},
    "hpcdist.__main__": {"hpcdist.cli"},
    "hpcdist.c10d": {
        *("hpcdist.core", "hpcdist.launch", ENVIRONMENT, "hpcdist.watch", "hpcdist.torch_bridge"),
        "hpcdist_stores",
    },
    "hpcdist.torch_bridge": {"hpcdist.core", "hpcdist.launch", ENVIRONMENT},
    "hpcdist.watch": {
        "hpcdist.core",
        "hpcdist.torch_bridge",
        ENVIRONMENT,
        ADDRESSES,
        PMI,
        "hpcdist_stores",
        "hpcdist_stores.keep_alive",
    },
    "hpcdist.launch": {"hpcdist.core", ENVIRONMENT, ADDRESSES, "hpcdist_stores"},
    ENVIRONMENT: set(),
    ADDRESSES: set(),
    PMI: {"hpcdist.core", "hpcdist.launch", ENVIRONMENT},
    "hpcdist.core": {"hpcdist_stores.keep_alive"},  # a Work and a group live as long as C++ holds them
    "hpcdist.backends": {"hpcdist.core", ENVIRONMENT, "hpcdist.backends.torch_c10d", "hpcdist_stores.keep_alive"},
    # its library is torch.distributed, which holds a part of the store
    "hpcdist.backends.torch_c10d": {"hpcdist.core", "hpcdist.torch_bridge", ENVIRONMENT, "hpcdist_stores.keep_alive"},
    "hpcdist.backends.gloo": {"hpcdist.core", "hpcdist.torch_bridge", "hpcdist.backends.torch_c10d", ADDRESSES},
    "hpcdist.backends.torch_gpu": {
        *("hpcdist.core", "hpcdist.torch_bridge", "hpcdist.backends.torch_c10d", "hpcdist.backends"),
        *(ENVIRONMENT, ADDRESSES),
    },
    "hpcdist_stores": {"hpcdist_stores.keep_alive"},
    "hpcdist_stores.keep_alive": set(),
    "hpcdist.autoload": {
        "hpcdist",
        "hpcdist.c10d",
        ENVIRONMENT,
        "hpcdist.torch_bridge",
    },  # inside functions, when it is asked for
}
MAY_IMPORT["hpcdist.cli"] = {*MAY_IMPORT, "hpcdist.backends"} - {"hpcdist.__main__"}

# the parts from the top down; not even an exception goes up
ORDER = (
    *("__main__", "cli", "autoload", "public", "dist2", "beyond", "c10d", "backends", "watch", "torch_bridge"),
    *("launch", "core"),
)

# (importer, imported) -> why it is allowed although the table above forbids it; an entry that is no longer needed
# fails the test
EXCEPTIONS = {
    ("hpcdist.backends.nccl.bootstrap", "hpcdist.launch.devices"): "which GPU belongs to this rank",
    ("hpcdist.backends.nccl.communicators", "hpcdist.launch.devices"): "which GPU belongs to this rank",
    ("hpcdist.backends.torch_gpu", "hpcdist.launch.rendezvous"): "the store that is opened over MPI",
    ("hpcdist.backends.mpi.node.threshold_file", "hpcdist.launch.topology"): "what the processor is called",
    ("hpcdist.backends.mpi.process.runtime", "hpcdist.launch.arrival"): "which ranks have not come to the start of MPI",
    ("hpcdist.c10d.names", "hpcdist.backends.mpi.process.runtime"): "asks whether there is an MPI",
    ("hpcdist.c10d.lifecycle", "hpcdist.backends.mpi.process.runtime"): "checks the user's communicator",
}
WHERE_MPI_IS = ("hpcdist.backends.mpi", "hpcdist.launch", "hpcdist.cli")
# one module of each of these imports no other's: mpi, nccl, loopback, and gloo with what carries c10d's own; torch's
# library for GPUs has c10d's methods and NCCL's streams
FAMILIES = {"gloo": "torch_c10d"}
OF_TWO = {"torch_gpu": ("torch_gpu", "torch_c10d", "nccl")}
STORE_SERVER = "hpcdist_stores.tcp.server.loop"  # the first module that the server's process imports
Graph = dict[str, set[str]]


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    parts = ("hpcdist_stores" if parts[0] == "stores" else parts[0], *parts[1:])  # the name that it is imported by
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(tree: ast.AST, is_deep: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield import statements: all, or only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        is_later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        if is_deep or not is_later:
            yield from statements(node, is_deep)


def imports(path: Path, is_deep: bool = True) -> Iterator[str]:
    """Yield the modules that a file imports.

    Args:
        path: the file.
        is_deep: take what is imported inside functions and for types too.
    """
    for node in statements(ast.parse(path.read_text()), is_deep):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                file = SRC.joinpath(*full.split("."))
                is_module = file.is_dir() or file.with_suffix(".py").exists()
                yield full if is_module else node.module


def part_of(module: str) -> str:
    return max((part for part in MAY_IMPORT if f"{module}.".startswith(f"{part}.")), key=len)


def reached(graph: Graph, starts: Iterable[str]) -> set[str]:
    """Return the modules that some modules import, themselves included, directly or through others."""
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += graph.get(module, ())
    return found


def circles(graph: Graph) -> set[frozenset[str]]:
    """Return the largest sets of modules that all reach each other."""
    reach = {module: reached(graph, graph[module]) for module in graph}
    return {
        frozenset(other for other in reach[module] if module in reach.get(other, ()))
        for module in graph
        if module in reach[module]
    }


FILES = {module_of(path): path for path in sorted(SRC.rglob("*.py"))}
WHOLE: Graph = {module: set(imports(path)) - {module} for module, path in FILES.items()}
AT_IMPORT: Graph = {module: set(imports(path, is_deep=False)) - {module} for module, path in FILES.items()}


def violations() -> set[tuple[str, str]]:
    """Return every import that the table forbids."""
    return {
        (module, imported)
        for module in FILES
        for imported in WHOLE[module]
        if imported.split(".")[0] in ("hpcdist", "hpcdist_stores")
        and part_of(imported) not in MAY_IMPORT[part_of(module)] | {part_of(module)}
    }


def test_imports_point_down():
    assert violations() <= set(EXCEPTIONS), sorted(violations() - set(EXCEPTIONS))


def test_no_exception_is_out_of_date():
    assert set(EXCEPTIONS) <= violations(), f"no longer needed: {sorted(set(EXCEPTIONS) - violations())}"


def test_no_import_goes_up():
    def level(module):
        parts = module.split(".")
        return len(ORDER) if parts[0] == "hpcdist_stores" else ORDER.index(parts[1]) if len(parts) > 1 else -1

    found = {
        (module, imported)
        for module in FILES
        for imported in WHOLE[module]
        if imported.split(".")[0] in ("hpcdist", "hpcdist_stores") and imported != "hpcdist"
        if level(imported) < level(module)
    }
    assert not found


def test_what_c10d_does_not_have_is_imported_by_nothing_below():
    def is_beyond(module):
        return module.startswith("hpcdist.beyond")

    found = {module for module in FILES if not is_beyond(module) and any(map(is_beyond, WHOLE[module]))}
    assert not {module for module in found if module != "hpcdist.public" and not module.startswith("hpcdist.cli.")}


def test_the_parts_form_no_circle():
    """Then what holds for each import holds through others too."""
    assert circles(MAY_IMPORT) == set()


def test_the_modules_form_no_circle():
    found = circles({module: those & FILES.keys() for module, those in WHOLE.items()})
    assert not found, f"these import each other: {[sorted(circle) for circle in found]}"


@pytest.mark.parametrize("module", [module for module in FILES if module.startswith("hpcdist.core")])
def test_the_engine_reaches_no_library_of_communication(module):
    roots = {name.split(".")[0] for name in reached(AT_IMPORT, [module])}
    assert not roots & {"mpi4py", "nccl", "cuda"}
    assert not [name for name in reached(AT_IMPORT, [module]) if name.startswith("hpcdist.backends")]


def test_import_hpcdist_reaches_no_mpi():
    assert not [name for name in reached(AT_IMPORT, ["hpcdist.public"]) if name.split(".")[0] in ("mpi4py", "nccl")]


def test_only_these_parts_import_mpi4py():
    found = {module for module in FILES if any(name.split(".")[0] == "mpi4py" for name in WHOLE[module])}
    assert not [module for module in found if not module.startswith(WHERE_MPI_IS)]


@pytest.mark.parametrize("module", [module for module in FILES if module.startswith("hpcdist.backends.")])
def test_backends_import_no_other_backend(module):
    def family(name):
        own = name.split(".")[2]
        return FAMILIES.get(own, own)

    for imported in WHOLE[module]:
        if imported.startswith("hpcdist.backends."):
            allowed = OF_TWO.get(module.split(".")[2], (family(module),))
            assert family(imported) in allowed, f"{module} imports {imported}"


def test_import_torch_loads_only_the_standard_library():
    """torch imports hpcdist.autoload, installed as a module of its own, in every program."""
    assert {name.split(".")[0] for name in AT_IMPORT["hpcdist.autoload"]} <= sys.stdlib_module_names


def test_stores_know_nothing_of_hpcdist():
    starts = [module for module in FILES if module.split(".")[0] == "hpcdist_stores"]
    assert not [name for name in reached(WHOLE, starts) if name.split(".")[0] in ("hpcdist", "mpi4py")]


def test_the_store_server_needs_only_the_standard_library():
    found = reached(WHOLE, [STORE_SERVER])
    assert "hpcdist_stores.tcp.server.keys" in found
    assert not {name.split(".")[0] for name in found} & {"torch", "numpy", "mpi4py", "hpcdist"}


def test_the_search_finds_circles_and_what_is_reached():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "x"}, "d": {"d"}}
    assert circles(graph) == {frozenset("bc"), frozenset("d")}
    assert reached(graph, ["a"]) == set("abcx")
    tree = ast.parse("import a\ndef f():\n    import b\nclass C:\n    import c\nif TYPE_CHECKING:\n    import d")
    assert [[each.names[0].name for each in statements(tree, deep)] for deep in (True, False)] == [
        ["a", "b", "c", "d"],
        ["a", "c"],
    ]


@pytest.mark.parametrize("folder", ["tests", "slurm", "docs"])
def test_what_programs_outside_of_the_package_import_is_there(folder):
    """Many of them run as processes of their own, in the slow tests only."""
    missing = []
    for path in (SRC.parent / folder).rglob("*.py"):
        for node in statements(ast.parse(path.read_text()), is_deep=True):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("hpcdist", "hpcdist_stores"):
                module = importlib.import_module(node.module)
                names = {f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)}
                missing += [(path.name, name) for name in names - FILES.keys()]
    assert not missing


def test_one_function_makes_groups():
    """The factory registers what it makes; a group made elsewhere would be watched by nobody."""
    found = [
        module
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "ProcessGroup"
    ]
    assert found == ["hpcdist.core.factory"]


def test_a_backend_must_implement_few_methods():
    """Every library has to have these; what only some can do has an answer for the others."""
    tree = ast.parse(FILES["hpcdist.core.backend"].read_text())
    found = [
        function.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "Backend"
        for function in node.body
        if isinstance(function, ast.FunctionDef) and "abstractmethod" in map(ast.unparse, function.decorator_list)
    ]
    assert 0 < len(found) <= 12, found
