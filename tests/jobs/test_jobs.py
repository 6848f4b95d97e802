"""The jobs of slurm/jobs: the same result on any number of ranks, with any launcher."""

from __future__ import annotations

import re

import pytest

from tests.forked import mpirun, python
from tests.ports import free_port
from tests.programs import BIN, LIBRARY, ROOT, output, run, start

pytestmark = pytest.mark.timeout(300)
TRAIN = ROOT / "slurm/jobs/train_digits.py"
SHARED = ROOT / "slurm/jobs/train_shared.py"
HEAT = ROOT / "slurm/jobs/heat2d.py"
SHORT = ["--epochs", "3"]


def reached(text: str) -> float:
    match = re.search(r"held-out accuracy ([\d.]+)", text)
    assert match, text
    return float(match.group(1))


@pytest.fixture(scope="module")
def short_accuracy() -> float:
    """What three epochs reach on one rank, without a launcher."""
    result = run([*python(), TRAIN, *SHORT])
    assert result.returncode == 0, result.stderr
    return reached(result.stdout)


def test_training_reaches_its_accuracy_on_any_number_of_ranks():
    accuracies = []
    for ranks in (1, 4):
        result = mpirun(ranks, [TRAIN], timeout=90)
        assert result.returncode == 0, result.stderr
        assert f"{ranks} ranks on mpi" in result.stdout
        accuracies.append(reached(result.stdout))
    assert accuracies[0] >= 0.96
    assert len(set(accuracies)) == 1


def test_training_resumes_from_its_checkpoint(tmp_path, short_accuracy):
    checkpoint = tmp_path / "states"
    first = mpirun(2, [TRAIN, "--epochs", "1", "--checkpoint", checkpoint])
    assert first.returncode == 0, first.stderr
    assert [path.name for path in checkpoint.iterdir()] == ["1-0"]
    second = mpirun(2, [TRAIN, *SHORT, "--checkpoint", checkpoint, "--resume"])
    assert second.returncode == 0, second.stderr
    assert "\n    1 " not in second.stdout
    assert reached(second.stdout) == short_accuracy


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_training_without_a_launcher(scheme, tmp_path, short_accuracy):
    if scheme == "file":
        url = f"file://{tmp_path}/rendezvous"
    else:
        url = f"tcp://127.0.0.1:{free_port()}"
    command = [*python(), TRAIN, *SHORT, "--init-method", url, "--world-size", "4", "--rank"]
    ranks = [start([*command, r]) for r in range(4)]
    try:
        outputs = [output(process, timeout=90)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * 4
    assert "4 ranks on gloo" in outputs[0]
    assert reached(outputs[0]) == short_accuracy


SPAWNED = """
import sys
import torch
import hpcdist as dist
dist.init_process_group(rank=int(sys.argv[1]), world_size=2)
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.item())
dist.destroy_process_group()
"""


def test_processes_of_the_programs_own_that_say_how_many_they_are():
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start([*python(), "-c", SPAWNED, rank], **address) for rank in range(2)]
    assert [output(process, timeout=60) for process in ranks] == [("gloo 2.0\n", "")] * 2
    alone = run([*python(), "-c", SPAWNED, "1"])
    assert "environment variable MASTER_ADDR expected, but not set" in alone.stderr


def test_training_under_torchrun(short_accuracy):
    result = run([BIN / "torchrun", "--standalone", "--nproc-per-node", "4", TRAIN, *SHORT], timeout=90)
    assert result.returncode == 0, result.stderr
    assert "4 ranks on gloo" in result.stdout
    assert reached(result.stdout) == short_accuracy


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_heat_equals_the_serial_result(ranks):
    result = mpirun(ranks, [HEAT, "--size", "50", "--steps", "200", "--check"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "largest difference" in result.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_dataset_of_which_a_node_has_one_copy(ranks):
    result = mpirun(ranks, [SHARED, "--mib", "32", "--steps", "60", "--workers", "1"], timeout=90)
    assert result.returncode == 0, result.stdout + result.stderr
    held = [float(each) for each in re.findall(r"holds ([\d.]+) MiB of the 32 MiB", result.stdout)]
    assert len(held) == ranks
    assert 0.98 * 32 < sum(held) < 1.02 * 32
    assert float(re.search(r"largest error of a weight after 60 steps: (\S+)", result.stdout)[1]) < 1e-4


WITHOUT_THREADS = """
import sys, threading
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
from mpi4py import MPI
import torch, hpcdist as dist
assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
dist.init_process_group()
tensors = [torch.ones(size) for size in (3, 100_000)]
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
works.append(dist.broadcast(torch.ones(2, 2).t(), 0, async_op=True))
assert all(work.is_completed() and work.wait() for work in works)
assert all(bool((tensor == 2).all()) for tensor in tensors)
assert works[0].get_future().wait()[0] is not None
print("threads", sorted(thread.name for thread in threading.enumerate()))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("level", ["single", "serialized"])
def test_an_application_whose_mpi_has_no_threads(level):
    result = mpirun(2, ["-c", WITHOUT_THREADS, level])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("threads") == 2
    assert "hpcdist-mpi" not in result.stdout


FINALIZED = """
import sys
import mpi4py
if sys.argv[1] == "ours":
    mpi4py.rc.initialize = False
from mpi4py import MPI
import torch, hpcdist as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
group, window, halo = dist.new_group(), dist.Window(4), dist.HaloExchange([size])
message = dist.irecv(torch.ones(3), (rank + 1) % size)
for each in range(100):  # until the calls are known
    dist.all_reduce(torch.ones(2)), dist.all_reduce(torch.ones(2), group=group), halo(torch.ones(9))
    dist.all_reduce(torch.ones(2), async_op=True).wait()
beside = dist.new_group(backend="gloo") if size > 1 else None
dist.barrier()
MPI.Finalize()
if beside is not None:
    dist.all_reduce(total := torch.ones(1), group=beside)
    sys.stdout.write(f"{int(total) == size}\\n")
    dist.destroy_process_group(beside)
for call in (
    lambda: dist.all_reduce(torch.ones(2)),
    lambda: dist.all_reduce(torch.ones(2), async_op=True),
    lambda: dist.all_reduce(torch.ones(2), group=group),
    lambda: dist.barrier(),
    lambda: dist.send(torch.ones(2), (rank + 1) % size) if size > 1 else dist.isend(torch.ones(2), 0),
    lambda: dist.irecv(torch.ones(2)),
    lambda: dist.new_group(),
    lambda: dist.all_gather_object([None] * size, 1),
    lambda: dist.all_gather_varied(torch.ones(2)),
    lambda: halo(torch.ones(9)),
    lambda: halo(torch.ones(8)),
    lambda: window.put(torch.ones(1), 0),
    lambda: dist.Window(4),
    lambda: message.wait(),
    lambda: dist.init_process_group(),
):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        sys.stdout.write(f"{'finalized' in str(error) or 'closed' in str(error)}\\n")  # not mixed with the other's
    else:
        sys.stdout.write("went on\\n")
window.close()
sys.stdout.write(f"{dist.is_initialized()}\\n")
"""


@pytest.mark.parametrize("whose", ["ours", "theirs"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_after_the_program_has_finalized_mpi(whose, ranks):
    result = mpirun(ranks, ["-c", FINALIZED, whose])
    if LIBRARY == "mpich" and "pthread_mutex_destroy" in result.stdout + result.stderr:
        pytest.skip("MPI_Finalize of this MPICH ends a process that tests a receive (docs/reference/known-issues.md)")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.split("\n")
    assert "went on" not in lines, result.stdout
    assert lines.count("True") == ranks * (15 + (ranks > 1)), result.stdout + result.stderr


RAISES_AFTERWARDS = """
from mpi4py import MPI
import hpcdist as dist
dist.init_process_group()
dist.barrier()
MPI.Finalize()
raise LookupError("once MPI has ended")
"""


def test_an_exception_after_the_program_has_finalized_mpi_is_shown_alone():
    result = mpirun(2, ["-c", RAISES_AFTERWARDS])
    assert result.returncode != 0
    assert "LookupError: once MPI has ended" in result.stderr
    assert "excepthook" not in result.stderr
    assert "the job is aborted" not in result.stderr


def test_a_child_of_a_rank_is_told_that_it_is_none(tmp_path):
    """A started process inherits the variables that say which rank it is; the job goes on and ends."""
    program = tmp_path / "job.py"
    program.write_text(
        "import multiprocessing\n"
        "import hpcdist as dist\n"
        "def child():\n"
        "    dist.init_process_group()\n"
        "if __name__ == '__main__':\n"
        "    dist.init_process_group()\n"
        "    if dist.get_rank() == 1:\n"
        "        process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "        process.start()\n"
        "        process.join()\n"
        "        assert process.exitcode == 1\n"
        "    dist.barrier()\n"
        "    dist.destroy_process_group()\n"
    )
    result = mpirun(2, [program], timeout=120)
    assert result.returncode == 0, result.stderr
    assert "of an MPI job and is not one of its ranks" in result.stderr
