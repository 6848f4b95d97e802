"""Rank 0 prints the world's size, the sum of its ranks and the arguments: all ranks of a launch form one world."""

import os
import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
nodes = set(comm.allgather(os.environ.get("SLURMD_NODENAME")))
total = comm.allreduce(comm.rank)
if comm.rank == 0:
    threads = os.environ.get("OMP_NUM_THREADS")
    print(f"world={comm.size} sum={total} nodes={len(nodes)} threads={threads} arguments={sys.argv[1:]}", flush=True)
