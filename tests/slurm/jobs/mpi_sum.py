"""Do all ranks of this launch form one world? Rank 0 prints its size, the sum of its ranks and what was passed on."""

import os
import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
nodes = set(comm.allgather(os.environ.get("SLURMD_NODENAME")))
total = comm.allreduce(comm.rank)
if comm.rank == 0:
    threads = os.environ.get("OMP_NUM_THREADS")
    print(f"world={comm.size} sum={total} nodes={len(nodes)} threads={threads} arguments={sys.argv[1:]}", flush=True)
