"""What a notebook does in an allocation: ranks started by srun, which stay between two cells."""

import os
import sys

import ipyparallel as ipp
from traitlets.config import Config

by_srun = Config(MPILauncher={"mpi_cmd": ["srun", f"--mpi={sys.argv[1]}", "--overlap"]})
with ipp.Cluster(engines="mpi", n=int(os.environ["SLURM_NTASKS"]), controller_ip="*", config=by_srun) as ranks:
    ranks[:].execute("import hpcdist as dist, torch; dist.init_process_group()", block=True)
    ranks[:].execute("total = torch.ones(1); dist.all_reduce(total)", block=True)
    print("sums", [float(each) for each in ranks[:]["total"]], flush=True)
    nodes = ranks[:].apply_sync(lambda: __import__("os").environ["SLURMD_NODENAME"])
    print("nodes", sorted(set(nodes)), flush=True)
    ranks[:].execute("dist.destroy_process_group()", block=True)
print("ended", flush=True)
