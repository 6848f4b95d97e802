"""Time until N ranks have a group: ``mpirun -n N python tests/bench/start.py``; with ``mpi``, until they have MPI.

Rank 0 prints a line of JSON: the seconds of each step on the slowest rank.
"""

import json
import sys
import time

SECONDS = {}


def step(name, call):
    """Time a step on this rank."""
    began = time.perf_counter()
    made = call()
    SECONDS[name] = time.perf_counter() - began
    return made


step("import torch", lambda: __import__("torch.distributed"))
if sys.argv[1:] == ["mpi"]:
    comm = step("MPI_Init", lambda: __import__("mpi4py.MPI").MPI.COMM_WORLD)
else:
    dist = step("import hpcdist", lambda: __import__("hpcdist"))
    step("init_process_group", dist.init_process_group)
    comm = dist.get_mpi_comm()
slowest = [max(ranks) for ranks in zip(*comm.allgather(list(SECONDS.values())), strict=True)]
if comm.rank == 0:
    print(json.dumps(dict(zip(SECONDS, slowest, strict=True))))
