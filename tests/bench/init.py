"""Subject ``init``: time of ``import hpcdist`` and of creating a group over all ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import hpcdist as dist
from hpcdist.cli.bench.timing import Bench, Figure

PROGRAM = """
import sys, time, torch, torch.distributed
began = time.perf_counter()
import hpcdist
assert 'mpi4py.MPI' not in sys.modules
print((time.perf_counter() - began) * 1e6)
"""


def import_time() -> list[float]:
    """Return how long `import hpcdist` takes after torch in fresh processes, in microseconds, sorted."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "PMIX", "PMI_"))}
    times = []
    for _ in range(5):
        show = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        times.append(float(show.stdout))
    return sorted(times)


def measure(bench: Bench) -> None:
    """Time the import on rank 0, and creating and destroying a group over all ranks."""
    if bench.rank == 0:
        times = import_time()
        bench.figures.append(Figure("import hpcdist after torch", "", 0, "hpcdist", times[2], times[0], times[-1]))
    bench.comm.Barrier()
    bench.compare(
        "new_group of all, destroyed",
        "",
        0,
        {"hpcdist": lambda: dist.destroy_process_group(dist.new_group()), "mpi4py": lambda: bench.comm.Dup().Free()},
    )
