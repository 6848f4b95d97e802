"""Program under torchrun, without MPI: CUDA tensors over NCCL, CPU tensors over gloo, and the store between the ranks.

torchrun --nproc-per-node=2 tests/gpu/torchrun_job.py
"""

import sys

import torch

import hpcdist as dist

dist.init_process_group("cpu:gloo,cuda:nccl")
rank, size = dist.get_rank(), dist.get_world_size()
assert torch.cuda.current_device() == rank, "each rank takes the GPU of its place on the node"
tensor = torch.full((10,), rank + 1.0, device="cuda")
dist.all_reduce(tensor)
dist.all_reduce(tensor, async_op=True).wait()
assert tensor.tolist() == [size * size * (size + 1) / 2] * 10
message = torch.full((3,), float(rank), device="cuda")
if rank == 0:
    dist.send(message, 1)
elif rank == 1:
    dist.recv(message, 0)
    assert message.tolist() == [0.0] * 3
pair = dist.new_group([0, 1])
if rank < 2:
    on_pair = torch.ones(4, device="cuda")
    dist.all_reduce(on_pair, group=pair)
    assert on_pair.tolist() == [2.0] * 4
on_cpu = torch.ones(2)
dist.all_reduce(on_cpu)
assert on_cpu.tolist() == [size] * 2
dist.barrier()
dist.destroy_process_group()
# torch's door, bound to the GPU
torch.distributed.init_process_group("hpcdist", device_id=torch.device("cuda", rank))
tensor = torch.ones(3, device="cuda")
first = torch.distributed.new_group([0])
torch.distributed.all_reduce(tensor)
if rank == 0:
    torch.distributed.all_reduce(tensor, group=first)
assert tensor.tolist() == [size] * 3
torch.cuda.synchronize()
torch.distributed.destroy_process_group()
emulated = sys.modules.get("tests.emulated_gpu.load")
broken = emulated.EMULATION.take_violations() if emulated else ""
assert not broken, broken
print(f"rank {rank} of {size}: CUDA tensors under torchrun, without MPI: right")
