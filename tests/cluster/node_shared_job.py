"""Job of ranks on several hosts: each host's ranks share a tensor of their own, which its lowest rank fills."""

import os

import torch

import hpcdist as dist
from hpcdist.core import memory_file

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
hosts: list = [None] * size
dist.all_gather_object(hosts, os.uname().nodename)
peers = [each for each in range(size) if hosts[each] == hosts[rank]]
tensor = dist.node_shared((size,), torch.int64, fill=lambda tensor: tensor.fill_(-rank))
dist.barrier()
tensor[rank] = 100 + rank
dist.barrier()
assert tensor.tolist() == [100 + each if each in peers else -peers[0] for each in range(size)], tensor
# a host without room: all ranks raise the same
if rank == size - 1:
    memory_file.free_bytes = lambda: 7
errors: list = [None] * size
try:
    dist.node_shared((1024,))
except dist.DistBackendError as error:
    dist.all_gather_object(errors, str(error))
assert len(set(errors)) == 1, errors
assert f"{hosts[-1]} has 7 bytes free, and 4096 are needed" in errors[0], errors
if rank == 0:
    print("all see their node's")
dist.barrier()
dist.destroy_process_group()
