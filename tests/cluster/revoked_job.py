"""Job of ranks on several hosts: revokes groups whose broadcast is on its way, one after another, and goes on."""

import sys

import torch

import hpcdist as dist

ROUNDS = 12

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
values = torch.ones(int(sys.argv[1]))
raised = 0
for number in range(ROUNDS):
    group = dist.new_group()
    dist.broadcast(values, 0, group=group)
    dist.barrier()
    try:
        if rank == number % size:
            dist.revoke_process_group(group)
        dist.broadcast(values, 0, group=group)
    except dist.DistBackendError:
        raised += 1
    dist.barrier()  # the default group lives on
    dist.destroy_process_group(group)
assert raised >= ROUNDS // size, raised  # who revoked it; another rank may have ended the call just before
dist.destroy_process_group()
