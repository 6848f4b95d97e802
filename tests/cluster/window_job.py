"""Job of ranks on several hosts: writes through windows on the own host and to others, and times one to a busy rank."""

import time

import torch

import hpcdist as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
mine = torch.zeros(size, dtype=torch.int64)
for memory in (size, mine):
    with dist.Window(memory, torch.int64) as window:
        for number in range(1, 4):
            for other in range(size):
                window.put(torch.tensor([100 * number + rank]), other, rank)
                window.signal(other)
            for other in range(size):
                window.wait_signal(other)
            assert window.tensor.tolist() == [100 * number + each for each in range(size)], window.tensor
            dist.barrier()
        got = torch.zeros(size, dtype=torch.int64)
        window.get(got, (rank + 1) % size)
        assert got.tolist() == window.tensor.tolist()
        dist.barrier()
        for _ in range(50):
            window.fetch_and_add(0, 0)  # by neighbours and by ranks of other hosts
        dist.barrier()
        assert rank or window.tensor[0] == 300 + 50 * size, window.tensor
        dist.barrier()
        if rank == 0:
            began = time.monotonic()
            window.put(torch.zeros(1, dtype=torch.int64), size - 1)
            took = time.monotonic() - began
            kind = "a tensor" if memory is mine else "elements"
            print(f"put to {kind} of a rank that sleeps for 0.5 s: {took:.3f} s", flush=True)
        elif rank == size - 1:
            time.sleep(0.5)
        dist.barrier()
if rank == 0:
    print("all written", flush=True)
dist.destroy_process_group()
