"""Do all ranks of this launch form one world? Prints the world's size and the sum of its ranks, from rank 0."""

import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
nodes = comm.allgather(__import__("os").environ.get("SLURMD_NODENAME", "?"))
total = comm.allreduce(comm.rank)
if comm.rank == 0:
    print(f"world={comm.size} sum={total} nodes={len(set(nodes))} args={sys.argv[1:]}", flush=True)
