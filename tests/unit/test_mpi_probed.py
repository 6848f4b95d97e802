"""Which MPI's receives from any rank are probed for: read from its version text."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py.MPI")

from hpcdist.backends.mpi.probed import netmod  # needs an MPI library


@pytest.mark.parametrize(
    ("version", "chosen", "expected"),
    [
        ("MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx,ofi\nMPICH configure: x", None, "ucx"),
        ("MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n", None, "ucx"),
        ("MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx,ofi\n", "ofi", "ofi"),
        ("MPICH Version:      4.3.0\nMPICH Device:       ch4:ofi\n", None, "ofi"),
        ("MPICH Version:      3.4\nMPICH Device:       ch3:nemesis\n", None, ""),
        ("Open MPI v5.0.11, package: Open MPI", "ucx", ""),
    ],
)
def test_network_module_of_mpich(version: str, chosen: str | None, expected: str) -> None:
    assert netmod(version, chosen) == expected
