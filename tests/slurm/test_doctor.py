"""The doctor's words on a real step: one that is right, and one that srun started for another MPI."""

import json
import shlex

import pytest

ON_TWO_NODES = ["srun", "--nodes=2", "--ntasks=2"]
DOCTOR = ["-m", "hpcdist", "doctor"]
OF_PMI = {"pmix": "Open MPI", "pmi2": "MPICH"}


def page_of(result):
    """Parse the page; a second one, of another rank, would not parse."""
    return json.loads(result.stdout[result.stdout.index("{") :])


def texts_of(page):
    return [each["text"] for each in page["findings"]]


def problems_of(page):
    return [each for each in page["findings"] if each["level"] == "problem"]


def test_it_sees_the_step_and_both_nodes(each_mpi, cluster):
    pmi, python = each_mpi["HPCDIST_MPI"], each_mpi["HPCDIST_PYTHON"]
    result = cluster.run(*ON_TWO_NODES, f"--mpi={pmi}", python, *DOCTOR, "--json", seconds=110)
    page = page_of(result)
    assert (result.returncode, page["verdict"]) == (0, "ok"), problems_of(page)
    assert len(page["ranks"]) == 2
    step = page["ranks"][0]["slurm"]
    assert (step["nodes"], step["tasks"], step["mpi"], step["answers"]) == ("n[1-2]", "2", pmi, True)
    texts = texts_of(page)
    place = f"step {step['job']}.0 on n[1-2], 2 tasks in the step, started with --mpi={pmi}"
    for text in (
        "started by srun, 2 ranks",
        "MPI_COMM_WORLD has 2 ranks",
        place,
        f"srun has {pmi}, which {OF_PMI[pmi]} needs: srun --mpi={pmi}",
        "2 ranks on 2 nodes, 1 each",
        "ranks and world size agree with the launcher",
    ):
        assert text in texts
    assert any(text.startswith("all 2 directed pairs of 2 nodes meet") for text in texts)


@pytest.mark.parametrize("pmi", ["none", "pmi2", "pmix"])
def test_the_wrong_pmi_is_named_with_the_command_that_fixes_it(each_mpi, pmi, cluster):
    if (right := each_mpi["HPCDIST_MPI"]) == pmi:
        pytest.skip("that is the right one")
    command = [*ON_TWO_NODES, f"--mpi={pmi}", each_mpi["HPCDIST_PYTHON"], *DOCTOR, "--json"]
    result = cluster.run(*command, seconds=110)
    page = page_of(result)
    assert (result.returncode, page["verdict"]) == (1, "wrong")
    (problem,) = problems_of(page)
    assert problem["remedy"].startswith(f"srun --mpi={right} ")
    assert "srun started 2 ranks" in problem["text"]
    assert "started by srun, 2 ranks" in texts_of(page)
    if pmi != "none":  # of which Slurm leaves no trace in the environment
        assert any(text.endswith(f"started with --mpi={pmi}") for text in texts_of(page))


@pytest.mark.timeout(500)
def test_typed_in_an_allocation_it_uses_all_of_it(cluster, any_mpi):
    """In salloc's shell, and at the terminal of ``srun --pty``, whose step has variables of a rank."""
    size = ["--nodes=2", "--ntasks=3"]
    demo = f"{any_mpi['HPCDIST_PYTHON']} -m hpcdist demo --epochs 1; exit"
    typed = shlex.join(["salloc", *size, "srun", "--nodes=1", "--ntasks=1", "--pty", "bash", "-c", demo])
    for command in (["salloc", *size, "bash", "-c", demo], ["script", "--quiet", "--command", typed, "/dev/null"]):
        result = cluster.run(*command, seconds=220)
        assert "\n3 ranks on mpi," in result.stdout, result.stdout + result.stderr
        assert f"--nodes=2 --ntasks=3 --mpi={any_mpi['HPCDIST_MPI']} " in result.stdout
