"""Recipes for conda-forge and Spack beside pyproject.toml, and the Dockerfile: what they need is what hpcdist needs."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs/packaging"
CONDA = RECIPES / "conda-forge/recipe.yaml"
# torch is called pytorch in conda-forge; Spack puts py- before a package of Python's
IN_CONDA = {"torch": "pytorch"}
REQUIREMENT = re.compile(r"([a-z0-9-]+)>=([0-9.]+)(?:,<([0-9]+))?$")


def listed(name: str) -> list[str]:
    """Return a list of pyproject.toml, which no Python 3.10 can parse by itself."""
    text = (ROOT / "pyproject.toml").read_text()
    return ast.literal_eval(re.search(rf"^{name} = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)[1])


def needed() -> dict[str, tuple[str, str | None]]:
    """Return hpcdist's dependencies: the oldest version, and the major version that is too new."""
    return {found[1]: (found[2], found[3]) for found in map(REQUIREMENT.match, listed("dependencies"))}


def version() -> str:
    return re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def test_conda_forge_recipe_has_the_same_dependencies():
    text = CONDA.read_text()
    run = text[text.index("\n  run:\n") : text.index("\ntests:")]
    found = re.findall(r"^    - ([a-z0-9-]+ >=[0-9.]+(?:,<[0-9]+)?)$", run, re.MULTILINE)
    expected = [
        f"{IN_CONDA.get(name, name)} >={low}{f',<{high}' if high else ''}" for name, (low, high) in needed().items()
    ]
    assert found == expected
    assert f'version: "{version()}"' in text
    assert f"- {listed('requires')[0].replace('>=', ' >=')}\n" in text


def test_spack_package_has_the_same_dependencies():
    text = (RECIPES / "spack/py_hpcdist/package.py").read_text()
    found = re.findall(r'depends_on\("py-(.*?)", type=\("build", "run"\)\)', text)
    upper = {name: str(int(high) - 1) if high else "" for name, (_, high) in needed().items()}
    assert found == [f"{name}@{low}:{upper[name]}" for name, (low, _) in needed().items()]
    assert f'version("{version()}"' in text
    assert f'"py-{listed("requires")[0].replace(">=", "@")}:", type="build"' in text


def test_conda_forge_recipe_renders():
    rattler = pytest.importorskip("rattler_build", reason="needs py-rattler-build")
    recipe = rattler.Stage0Recipe.from_file(CONDA)
    (made,) = recipe.render(rattler.VariantConfig({"python_min": ["3.10"]}))
    assert "python >=3.10" in made.recipe.requirements.to_dict()["run"]


def test_hadolint_finds_nothing():
    checker = shutil.which("hadolint")
    if checker is None:
        pytest.skip("no hadolint here")
    done = subprocess.run([checker, RECIPES / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_what_the_dockerfile_names_is_there():
    text = (RECIPES / "Dockerfile").read_text()
    assert (ROOT / re.search(r"--constraint /src/(\S+)", text)[1]).exists()
    assert re.search(r"^ARG MPI=(.*)$", text, re.MULTILINE)[1] in (ROOT / "pyproject.toml").read_text()
