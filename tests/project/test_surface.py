"""The public surface: names, signatures, docstrings, types, documented variables."""

import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest
import torch.distributed as c10d

import hpcdist

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_public_names_are_there_and_in_order():
    assert len(set(hpcdist.__all__)) == len(hpcdist.__all__)
    for name in hpcdist.__all__:
        assert hasattr(hpcdist, name), name


def test_nothing_else_looks_public():
    modules = {name for name, value in vars(hpcdist).items() if inspect.ismodule(value)}
    public = {name for name in vars(hpcdist) if not name.startswith("_")} - modules
    assert public == set(hpcdist.__all__) - modules


def test_a_name_that_only_torch_has_says_where_it_is():
    where = "; torch.distributed.distributed_c10d is torch's, for the same groups"
    with pytest.raises(AttributeError, match=f"module 'hpcdist' has no attribute 'distributed_c10d'{where}$") as raised:
        hpcdist.distributed_c10d  # noqa: B018
    assert (raised.value.name, raised.value.obj) == (
        "distributed_c10d",
        hpcdist,
    )  # by which Python finds what was meant


@pytest.mark.parametrize("name", hpcdist.__all__)
def test_public_functions_say_what_they_do(name):
    value = getattr(hpcdist, name)
    if not getattr(value, "__module__", "").startswith("hpcdist"):
        return  # torch's own, or a constant
    doc = inspect.getdoc(value)
    assert doc, name
    first = doc.split("\n\n")[0]
    assert first.endswith((".", ":")), f"{name}: {first!r} is no sentence"
    if not inspect.isfunction(value):
        return
    named = [p for p in inspect.signature(value).parameters if not p.startswith("_")]
    elsewhere = any(other != name and f"``{other}" in doc for other in hpcdist.__all__)  # "the same as ``send``"
    if len(named) > 2 and not elsewhere:
        missing = [p for p in named if not re.search(rf"\b{p}\b", doc)]
        assert not missing, f"{name} does not explain {missing}"


@pytest.mark.parametrize("name", [name for name in hpcdist.__all__ if inspect.isfunction(getattr(c10d, name, None))])
def test_signatures_start_with_torchs(name):
    ours = getattr(hpcdist, name)
    mine, theirs = list(inspect.signature(ours).parameters), list(inspect.signature(getattr(c10d, name)).parameters)
    extra = [p for p in mine if p not in theirs]
    assert [p for p in mine if p in theirs] == theirs, f"{name}: {mine} for {theirs}"
    defaults = inspect.signature(ours).parameters
    assert all(defaults[p].default is not inspect.Parameter.empty for p in extra), f"{name}: {extra} have no default"


def test_types_are_shipped():
    for package in ("hpcdist", "stores"):
        assert (ROOT / "src" / package / "py.typed").exists()


def test_no_bin_for_what_fits_nowhere():
    assert not [path for path in SOURCES if path.stem in ("utils", "util", "helpers", "common", "misc")]


def test_no_chain_of_ifs_over_backends_dtypes_or_ops():
    """A table says it; two cases may stand in code, three are a table."""
    pattern = re.compile(
        r"elif .*(==|\bis\b|\bin\b).*(torch\.(float|int|uint|bool|complex)|ReduceOp\.|\"(mpi|nccl|gloo)\")"
    )
    for path in SOURCES:
        lines = [line for line in path.read_text().splitlines() if pattern.search(line)]
        assert len(lines) < 2, f"{path}: {lines}"


def test_every_variable_is_documented():
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    files = [*SOURCES, *(ROOT / "slurm").glob("*.sbatch")]
    found = {name for path in files for name in re.findall(r"\bHPCDIST_[A-Z][A-Z_]*[A-Z]\b", path.read_text())}
    missing = sorted(found - set(re.findall(r"HPCDIST_[A-Z_]+", page)))
    assert not missing, f"docs/reference/environment.md lacks {missing}"


def test_the_version_is_said_once_to_each():
    assert f'version = "{hpcdist.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {hpcdist.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_installed_console_script():
    try:
        scripts = importlib.metadata.distribution("hpcdist").entry_points.select(group="console_scripts")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hpcdist is on the path and not installed")
    assert [(script.name, script.value) for script in scripts] == [("hpcdist", "hpcdist.cli.main:main")]


USERS = """
import torch
import hpcdist as dist

def total() -> torch.Tensor:
    table = dist.node_shared((2, 2), torch.float32)
    work = dist.all_reduce(table, dist.ReduceOp.SUM, async_op=True)
    assert isinstance(work, dist.Work) and work.wait()
    rows, sizes = dist.all_gather_varied(table)
    with dist.Window(10, torch.float32) as window, dist.elastic(spares=1) as job:
        for step in job.steps({"model": torch.nn.Linear(1, 1)}, 3):
            with step as number:
                window.put(table, dist.get_rank() + number)
    return table[0] + window.tensor
"""


def test_the_types_of_a_users_program_fit(monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    api = pytest.importorskip("mypy.api")
    options = ["--config-file=", "--strict", "--follow-imports=silent", "--cache-dir", str(ROOT / ".mypy_cache/users")]
    said, _, status = api.run([*options, "-c", USERS])
    assert status == 0, said
    said, _, status = api.run([*options, "-c", f"{USERS}\ndist.nonsense"])
    assert (status, 'has no attribute "nonsense"' in said) == (1, True), said
