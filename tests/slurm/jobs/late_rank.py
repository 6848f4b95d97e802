"""Job whose last rank is late for an all_reduce until a file is there."""

import sys
import time
from pathlib import Path

import torch

import hpcdist as dist

dist.init_process_group()
dist.barrier()
if dist.get_rank() == 0:
    print("begun", flush=True)
if dist.get_rank() == dist.get_world_size() - 1:
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
