"""Do torchrun's ranks form one world? Sums their numbers over gloo."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(f"world={dist.get_world_size()} sum={int(total)}", flush=True)
dist.destroy_process_group()
