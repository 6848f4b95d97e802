"""Do the ranks go on that are left after one is killed? Rank 1 kills itself; the others shrink the world (ULFM)."""

import os
import signal
import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
comm.Set_errhandler(MPI.ERRORS_RETURN)
comm.Barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        comm.allreduce(1)
except MPI.Exception:
    comm.Revoke()
left = comm.Shrink()
total = left.allreduce(1)
if left.rank == 0:
    print(f"started={comm.size} left={total}", flush=True)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
