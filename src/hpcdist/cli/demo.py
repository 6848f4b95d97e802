"""The command ``demo``: trains a small network on scikit-learn's handwritten digits, on several ranks of this machine.

``python -m hpcdist demo`` starts the ranks by srun in an allocation of Slurm, else by mpirun, or by torchrun (on gloo)
if there is no MPI; under a launcher (``srun python -m hpcdist demo``) this process is one of them. The script is
``slurm/jobs/train_digits.py``, which is installed with the package; options that are not the demo's are the script's,
such as ``--epochs 3``.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec

from hpcdist.backends.mpi.process import runtime
from hpcdist.cli.doctor import mpi_library, slurm_step
from hpcdist.cli.job_arguments import JobParser, count
from hpcdist.cli.submit import CHECKOUT, installed
from hpcdist.core.errors import DistBackendError
from hpcdist.launch import environment

SCRIPT = "train_digits.py"
RANKS = 4
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # such as in a container


def parser() -> JobParser:
    made = JobParser("demo", __doc__)
    about = f"how many to start if no launcher does ({RANKS}, or the allocation's tasks)"
    made.add_argument("--ranks", type=count, help=about)
    return made


def command(ranks: int) -> list[str]:
    """Return the command line that starts the ranks: mpirun's, or torchrun's if there is no MPI."""
    mpirun = mpi_library.own_mpirun() or mpi_library.launcher()  # the one on the PATH may be another MPI's
    try:
        runtime.load()
    except DistBackendError:
        mpirun = None
    if mpirun is None:
        return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    _, version = mpi_library.output_of([mpirun, "--version"])
    return [mpirun, *mpi_library.room_for_ranks(version), "-n", str(ranks), sys.executable]


def run(args: list[str]) -> int:
    made = parser()
    given, others = made.parse_known_args(args)
    if find_spec("sklearn") is None:
        made.error("the demo needs scikit-learn: pip install 'hpcdist[demo]'")
    start, script = slurm_step.whole_allocation(given.ranks), str(installed(SCRIPT, CHECKOUT / "jobs"))
    if environment.detect() is not None and not start:
        sys.argv = [script, *others]
        runpy.run_path(script, run_name="__main__")
        return 0
    line = [*([*start, sys.executable] if start else command(given.ranks or RANKS)), script, *others]
    print("$", *line, flush=True)
    # one thread for each rank, because the ranks share the cores
    own = mpi_library.mpi_free_environment() if start else dict(os.environ)
    started = subprocess.Popen(line, env={"OMP_NUM_THREADS": "1", **AS_ROOT, **own})
    try:
        return started.wait()
    except KeyboardInterrupt:  # the terminal has interrupted the launcher too, which ends its ranks
        return started.wait()
