"""Is anything left of a job that is cancelled? Ranks with children of their own and shared memory, which never end."""

import subprocess
import sys
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
window = MPI.Win.Allocate_shared(1 << 20, comm=node)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
comm.Barrier()
if comm.rank == 0:
    print("running", flush=True)
time.sleep(600)
