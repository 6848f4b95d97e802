"""Sum over the ranks that are left after rank 1 has killed itself and the others have shrunk the world (ULFM)."""

import contextlib
import os
import signal
import sys
import time
from array import array

from mpi4py import MPI


def count(comm):
    """Count the ranks of a communicator, on the communicator itself.

    mpi4py's allreduce of an object makes a duplicate of its own, which Revoke does not reach: a rank in it would wait
    for ever for one that has gone on to Shrink.
    """
    one, ranks = array("i", [1]), array("i", [0])
    comm.Allreduce(one, ranks)
    return ranks[0]


comm = MPI.COMM_WORLD
comm.Set_errhandler(MPI.ERRORS_RETURN)
comm.Barrier()
if comm.rank == 1:
    # In Open MPI 5.0.11 a rank still in its first barrier when another dies may stay there: neither the death nor the
    # revocation reaches it (about one time in three on two nodes).
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        count(comm)
except MPI.Exception:
    comm.Revoke()
left = comm.Shrink()
left.Set_errhandler(MPI.ERRORS_RETURN)
total = count(left)
if left.rank == 0:
    print(f"started={comm.size} left={total}", flush=True)
with contextlib.suppress(MPI.Exception):  # a rank that has already exited counts as dead to those that still leave
    left.Barrier()
sys.stdout.flush()
# After a failure Open MPI 5.0.11 hung in MPI_Finalize 6 times out of 26; leaving without it ended well each time.
os._exit(0)
