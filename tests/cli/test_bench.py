"""Subjects of ``python -m hpcdist bench`` on 2 ranks: every row has a figure of each side."""

import json

import pytest

from tests.programs import MPIRUN, mpirun

pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")

ROWS = {
    "latency": {
        "all_reduce": {"hpcdist", "mpi4py"},
        "all_reduce, async_op and wait": {"hpcdist", "synchronous", "mpi4py", "gloo"},
        "all_reduce of functional collectives": {"hpcdist", "synchronous", "torch's part"},
        "irecv and isend, and waits": {"hpcdist", "mpi4py"},
    },
    "varied": {
        "all_gather_varied": {"hpcdist", "mpi4py", "in slots"},
        "all_to_all_varied": {"hpcdist", "mpi4py"},
    },
    "halo": {
        "halo, 2 rows": {"hpcdist", "mpi4py"},
        "halo, 2 columns": {"hpcdist", "mpi4py"},
        "exchange with 2 ranks": {"hpcdist", "mpi4py"},
    },
    "torch": {
        "DDP step": {"hpcdist", "gloo", "torch's part"},
        "FSDP2 step": {"hpcdist", "gloo", "torch's part"},
        "DTensor redistribute": {"hpcdist", "gloo", "torch's part"},
        "tensor-parallel block": {"hpcdist", "gloo", "torch's part"},
        "pipeline step": {"hpcdist", "gloo"},
        "checkpoint save": {"hpcdist", "gloo"},
    },
}


@pytest.mark.parametrize("subject", ROWS)
def test_every_row_has_each_side(subject, tmp_path):
    file = tmp_path / "figures.json"
    options = ["--rounds", 1, "--seconds", 0.001, "--json", file]
    done = mpirun(2, ["-m", "hpcdist", "bench", subject, *options], timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for figure in json.loads(file.read_text())["figures"]:
        assert figure["median"] > 0
        found.setdefault(figure["what"], set()).add(figure["side"])
    assert {what: found.get(what) for what in ROWS[subject]} == ROWS[subject]
