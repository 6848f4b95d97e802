"""Two ranks on one GPU over NCCL: whether a communicator and its sum are right."""

import torch

import hpcdist as dist
from hpcdist.backends.nccl.library import load

dist.init_process_group("cpu:mpi,cuda:nccl")
size = dist.get_world_size()
for _ in range(3):
    tensor = torch.full((1 << 20,), dist.get_rank() + 1.0, device="cuda")
    dist.all_reduce(tensor)
assert tensor[0].item() == size * (size + 1) / 2
if dist.get_rank() == 0:
    print("OK two ranks on one GPU, NCCL", load().version)
dist.destroy_process_group()
