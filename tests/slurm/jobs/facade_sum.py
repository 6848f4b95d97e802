"""Sum of the ranks' numbers with hpcdist as a user calls it, with no argument."""

import torch

import hpcdist as dist

dist.init_process_group()
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(f"world={dist.get_world_size()} sum={int(total)} backend={dist.get_backend()}", flush=True)
dist.destroy_process_group()
