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
left.Barrier()
sys.stdout.flush()
# After a failure Open MPI 5.0.11 hung in MPI_Finalize 6 times out of 26; leaving without it ended well each time.
os._exit(0)
