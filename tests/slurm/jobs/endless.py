"""Ranks with children of their own and shared memory, which never end: a job to cancel."""

import subprocess
import sys
import time

import torch
from mpi4py import MPI

import hpcdist as dist

dist.init_process_group()
dist.all_reduce(torch.ones(1 << 20))  # through a window, where that is faster
window = MPI.Win.Allocate_shared(1 << 20, comm=MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
dist.barrier()
if dist.get_rank() == 0:
    print("running", flush=True)
time.sleep(600)
