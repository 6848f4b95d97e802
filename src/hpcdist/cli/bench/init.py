"""How long does it take until a rank can begin? Imports, and init_process_group again after destroy."""

from __future__ import annotations

import os
import subprocess
import sys

from hpcdist.cli.bench.timing import Bench, Figure

PROGRAM = "import time, torch, torch.distributed; t = time.perf_counter(); import hpcdist; {check}; {show}"
CHECK = "import sys; assert 'mpi4py.MPI' not in sys.modules"
SHOW = "print((time.perf_counter() - t) * 1e6)"


def import_time() -> list[float]:
    """Return how long `import hpcdist` takes after torch in fresh processes, in microseconds, sorted."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "PMIX", "PMI_"))}
    times = []
    for _ in range(5):
        show = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(check=CHECK, show=SHOW)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        times.append(float(show.stdout))
    return sorted(times)


def measure(bench: Bench) -> None:
    """Time the import on rank 0, and a group over all ranks made and destroyed."""
    import hpcdist as dist

    if bench.rank == 0:
        times = import_time()
        bench.figures.append(Figure("import hpcdist after torch", "", 0, "hpcdist", times[2], times[0], times[-1]))
    bench.comm.Barrier()
    bench.compare(
        "new_group of all, destroyed",
        "",
        0,
        {
            "hpcdist": lambda: dist.destroy_process_group(dist.new_group()),
            "mpi4py": lambda: bench.comm.Dup().Free(),
        },
    )
