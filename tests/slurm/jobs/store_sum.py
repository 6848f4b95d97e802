"""Sum of the ranks' numbers over what init_method="slurm://" finds: srun's ranks form one world without MPI."""

import os

import torch

import hpcdist as dist

os.environ["PATH"] = ""  # a host without scontrol
dist.init_process_group(init_method=os.environ["HPCDIST_INIT_METHOD"])
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
nodes: list = [None] * dist.get_world_size()
dist.all_gather_object(nodes, os.environ["SLURMD_NODENAME"])
if dist.get_rank() == 0:
    print(f"world={dist.get_world_size()} sum={int(total)} nodes={len(set(nodes))}", flush=True)
dist.destroy_process_group()
