"""The tests of ``tests/mpi`` with their ranks on several hosts.

Nearly all of them are of groups, wherever their ranks are. Those that take the communicator ``of_host`` are of a node:
``test_shared_memory.py``, and what waits in a window. Each host's ranks run these by themselves.
"""

from __future__ import annotations

import sys

import pytest

from tests.cluster import launch
from tests.cluster.hosts import Cluster
from tests.faults.launch import LIBRARY
from tests.programs import ROOT

pytestmark = [pytest.mark.skipif(LIBRARY == "none", reason="this environment has no mpirun"), pytest.mark.timeout(900)]
FILES = sorted(path.name for path in (ROOT / "tests/mpi").glob("test_*.py"))
SLOTS = [(1, 2), (2, 2)]
IN_SMOKE = {  # on the first of them; the value tells whether on MPICH too
    "test_collectives.py": True,
    "test_halo.py": False,
    "test_point_to_point.py": True,
    "test_varied.py": False,
}


def marks(name: str, slots: tuple[int, ...]) -> list[pytest.MarkDecorator]:
    """Return what CI runs of the files."""
    if name not in IN_SMOKE or slots != SLOTS[0]:
        return []
    return [pytest.mark.smoke, *([pytest.mark.mpich] if IN_SMOKE[name] else [])]


CASES = [pytest.param(name, slots, id=f"{name}-{slots}", marks=marks(name, slots)) for name in FILES for slots in SLOTS]
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # this pytest is the tests' own job: its ranks share one verdict. Open MPI hands on only variables that it is told
    # to, so that the mark of a child would reach the ranks of the first host only, and the others would wait for them
    "HPCDIST_TEST_CHILD": "",
}


@pytest.mark.parametrize(("name", "slots"), CASES)
def test_on_several_hosts(cluster: Cluster, name: str, slots: tuple[int, ...]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--with-mpi", f"tests/mpi/{name}"]
    done = launch.run(cluster, slots, command, seconds=800, **VARIABLES)
    assert done.returncode == 0, done.stdout + done.stderr
