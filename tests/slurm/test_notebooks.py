"""Ranks of a notebook in an allocation of two nodes."""

import importlib.util

import pytest

SCRIPT = """#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=notebook-%j.out
"$HPCDIST_PYTHON" "$1" "$HPCDIST_MPI"
"""


@pytest.mark.skipif(importlib.util.find_spec("ipyparallel") is None, reason="needs ipyparallel")
def test_ranks_that_srun_started_stay_between_two_cells(cluster, jobs, any_mpi, tmp_path):
    (tmp_path / "job.sbatch").write_text(SCRIPT)
    number = cluster.submit(tmp_path / "job.sbatch", jobs / "notebook.py", folder=tmp_path, **any_mpi)
    job = cluster.wait(number)
    assert job.exit_status == 0, job.output
    assert "sums [2.0, 2.0]\nnodes ['n1', 'n2']\n" in job.output
    assert job.output.endswith("ended\n")
