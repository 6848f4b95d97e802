"""What pyproject.toml says of the package, and the licences of what it needs: each goes with BSD-3-Clause."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
# the words by which packages name licences that ask for no more than to be named; MPL-2.0 covers its own files only
FREE = r"MIT|BSD|Apache|PSF|Python Software Foundation|Zlib|CC0|BSL-1\.0|MPL|Mozilla Public License|ISC|OpenMPI|MPICH"
# with torch's build for CUDA, and Intel MPI's wheel: their vendors' own, as torch's and the user's choice
VENDORS = ("nvidia-", "cuda-", "triton", "impi-rt", "intel-", "tbb", "umf", "tcmlib")
GPL = re.compile(r"\b(A|L)?GPL|General Public License", re.IGNORECASE)


def licences(distribution: metadata.Distribution) -> list[str]:
    """Return what a package says of its licence, the most exact first."""
    about = distribution.metadata
    classified = [line for line in about.get_all("Classifier", []) if line.startswith("License ::")]
    first_line = (about.get("License") or "").strip().partition("\n")[0]  # some give the whole text
    return [text for text in (about.get("License-Expression"), *classified, first_line) if text]


def needed() -> dict[str, metadata.Distribution]:
    """Return the packages that users need and that are installed here, with what those need: no tools of developers."""
    found: dict[str, metadata.Distribution] = {}
    lists = re.findall(r"^(?:dependencies|openmpi|mpich|plot|demo) = (\[.*?\])$", PYPROJECT, re.MULTILINE | re.DOTALL)
    # as the file has them, not an older installation
    waiting = [name for each in lists for name in re.findall(r'"([a-z][\w-]*)[<>=]', each)]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found or name.startswith(VENDORS):
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # an extra that this environment is without
            continue
        found[name] = distribution
        waiting += [re.match(r"[\w.-]+", line)[0] for line in distribution.requires or [] if "extra ==" not in line]
    return found


def test_every_licence_goes_with_ours():
    found = needed()
    assert {"torch", "numpy", "mpi4py", "rich"} <= set(found)
    wrong = {
        name: licences(each)
        for name, each in found.items()
        if not re.search(FREE, " ".join(licences(each))) or GPL.search(" ".join(licences(each)))
    }
    assert not wrong


def stated(name: str) -> str:
    """Return a text of pyproject.toml, which no Python 3.10 can parse by itself."""
    return re.search(rf'^{name} = "(.*)"$', PYPROJECT, re.MULTILINE)[1]


def test_the_citation_names_this_version():
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert {f"version: {stated('version')}", f"license: {stated('license')}"} <= set(lines)


def test_the_classifiers_name_the_pythons_that_are_tested():
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert stated("requires-python") == f">={versions[0]}"
    tested = re.findall(r"^(?:OLDEST|NEWEST) = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tested == [versions[0], versions[-1]]
