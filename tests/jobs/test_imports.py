"""Imports, forks, wrong launchers and uncaught exceptions, each in processes of its own."""

import importlib.util
import sys
from pathlib import Path

import pytest

import hpcdist
from tests.forked import python
from tests.programs import mpirun, run

pytestmark = pytest.mark.timeout(300)

CHILDREN = """
import multiprocessing, os, sys
import hpcdist as dist

def loaded(queue):
    import hpcdist
    queue.put(("mpi4py.MPI" in sys.modules, hpcdist.is_initialized()))

if __name__ == "__main__":
    dist.init_process_group("mpi")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=loaded, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == (False, False), "a spawned child initialised MPI"
    process.join()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:  # a fork inherits what was imported; it must start nothing of its own
        import importlib
        from mpi4py import MPI
        before = MPI.Is_initialized()
        importlib.reload(sys.modules["hpcdist"])
        os._exit(0 if MPI.Is_initialized() == before else 1)
    assert os.waitpid(pid, 0)[1] == 0
    dist.barrier()
    dist.destroy_process_group()
"""


FORKS = """
import multiprocessing, os, sys, time
import torch
import hpcdist as dist

dist.init_process_group("mpi")
dist.all_reduce(torch.ones(2), async_op=True).wait()
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool:  # it ends its workers by SIGTERM
    assert pool.map(abs, [-1, -2]) == [1, 2]
process = context.Process(target=time.sleep, args=(60,))
process.start()
process.terminate()
process.join(30)
assert process.exitcode == -15, process.exitcode
sys.stdout.flush()
if (pid := os.fork()) == 0:
    sys.exit(3)
assert os.waitpid(pid, 0)[1] == 3 << 8
if (pid := os.fork()) == 0:
    sys.stderr = open(os.devnull, "w")
    raise RuntimeError("of the child alone")
assert os.waitpid(pid, 0)[1] == 1 << 8
receive = dist.irecv(torch.empty(1), 1 - dist.get_rank())
dist.all_reduce(large := torch.ones(1 << 20))  # through shared memory
window = dist.Window(4)
halo = dist.HaloExchange([2])
for _ in range(2):  # the second takes messages that are kept
    halo(cells := torch.zeros(8))
late = dist.barrier(async_op=True) if dist.get_rank() == 0 else None  # nobody can end it before the fork
if (pid := os.fork()) == 0:
    assert dist.get_rank() in (0, 1) and dist.get_world_size() == 2 and dist.get_backend() == "mpi"
    for call in (
        receive.wait if late is None else late.wait,
        receive.wait,
        dist.barrier,
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(large, async_op=True),
        lambda: dist.send(torch.ones(1), 1 - dist.get_rank()),
        lambda: dist.all_gather_object([None, None], 1),
        lambda: dist.new_group([0, 1]),
        lambda: window.put(torch.ones(1), 0),
        lambda: window.signal(0),
        lambda: halo(cells),
        lambda: torch.distributed.all_reduce(torch.ones(3)),
    ):
        try:
            call()
        except dist.DistBackendError as error:
            assert "forked-child" in str(error)
        else:
            raise AssertionError(call)
    window.close()  # the parent's stays open
    try:
        sys.exit(4)
    finally:
        dist.destroy_process_group()  # as programs end; the parent's groups stay
assert os.waitpid(pid, 0)[1] == 4 << 8
dist.send(torch.ones(1), 1 - dist.get_rank())
receive.wait()
dist.barrier() if late is None else late.wait()
window.put(torch.ones(1), 0)
window.close()
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == dist.get_world_size()
print("whole")
"""


def test_modules_of_a_user_do_not_hide_ours(tmp_path):
    """Python looks beside the script first: what is installed has names that no user's module has."""
    (tmp_path / "stores.py").write_text("mine = 1\n")
    for name in ("file", "tcp", "launch"):
        folder = tmp_path / "folder" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("mine = 2\n")
    (tmp_path / "folder" / "stores").mkdir()
    (tmp_path / "folder" / "stores" / "__init__.py").write_text("mine = 2\n")
    code = (
        "import sys, torch, hpcdist, stores\n"
        "store = hpcdist.TCPStore('127.0.0.1', 0, 1, True)\n"  # its server is a process that imports for itself
        "hpcdist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "hpcdist.all_reduce(total := torch.ones(2))\n"
        "print(stores.mine, total.tolist())\n"
    )
    for number, folder in enumerate((tmp_path, tmp_path / "folder"), start=1):
        (folder / "script.py").write_text(code)
        done = run([sys.executable, folder / "script.py"], folder=folder)
        assert done.stdout == f"{number} [1.0, 1.0]\n", done.stderr


def test_children_of_an_initialised_rank(tmp_path):
    program = tmp_path / "children.py"
    program.write_text(CHILDREN)
    result = mpirun(1, [program])
    assert result.returncode == 0, result.stderr


def test_forked_children_are_no_ranks():
    done = mpirun(2, ["-c", FORKS], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("whole") == 2


@pytest.mark.timed
def test_import_is_quick():
    code = (
        "import time, torch, torch.distributed, numpy; start = time.process_time(); import hpcdist; "
        "hpcdist.all_reduce; print(time.process_time() - start)"
    )
    seconds = min(float(run([sys.executable, "-c", code]).stdout) for _ in range(3))
    assert seconds < 1  # the figure itself is the bench's; this guards against importing MPI or a compiler


def test_a_launcher_that_speaks_another_mpi_is_an_error():
    code = "import hpcdist; hpcdist.init_process_group()"
    for variables, launcher in (
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun (Open MPI)"),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, "hydra"),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "9"}, "srun"),
    ):
        # the variables alone, without the launcher behind them: MPI starts as a world of one
        program = f"import os; os.environ.update({variables!r})\nfrom mpi4py import MPI\n{code}"
        start = f"from mpi4py import MPI\n{program}"
        result = run([*python(), "-c", start])
        assert result.returncode != 0
        assert launcher in result.stderr
        assert "started 4 ranks (this is rank 2)" in result.stderr
        assert "sees a world of 1" in result.stderr


FAILS = """
import sys, torch

def hook(*error):
    print("the program has a hook of its own", file=sys.stderr)
    sys.__excepthook__(*error)

sys.excepthook = hook
dist.init_process_group(None if "hpcdist" in dist.__name__ else "hpcdist")
dist.barrier()
if dist.get_rank() == 1:
    raise ZeroDivisionError("on purpose")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("door", ["import hpcdist as dist", "import torch.distributed as dist"])
def test_an_uncaught_exception_ends_the_job(door):
    # without an end of the job, ranks 0 and 2 would wait for 30 minutes
    result = mpirun(3, ["-c", f"{door}\n{FAILS}"], timeout=90, python=python())
    assert result.returncode != 0
    assert "[rank 1 of 3] uncaught exception" in result.stderr
    assert "the program has a hook of its own\nTraceback" in result.stderr
    assert "ZeroDivisionError: on purpose" in result.stderr


def test_the_installed_copy_of_what_import_torch_calls_is_that_of_this_package():
    """An editable installation has a copy of it; ``make`` installs again after a change."""
    copy = importlib.util.find_spec("hpcdist_autoload")
    source = Path(hpcdist.__file__).with_name("autoload.py")
    if not source.exists() or copy is None:  # a wheel has no other than the copy
        pytest.skip("not a checkout")
    assert Path(copy.origin).read_bytes() == source.read_bytes(), "install again: make environment"
