"""CUDA tensors over MPI, staged through the host: right values, and the time of all_reduce at the bytes given."""

from __future__ import annotations

import sys
import time
import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

import hpcdist as dist

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.complex64,
)  # fmt: skip


def check_sums(rank: int, size: int, device: torch.device) -> None:
    total = size * (size + 1) / 2
    for dtype in DTYPES:
        for is_async in (False, True):
            tensor = torch.full((1000,), rank + 1, dtype=dtype, device=device)
            work = dist.all_reduce(tensor, async_op=is_async)
            if work is not None:
                work.wait()
            assert bool((tensor == total).all()), dtype


def check_moves(rank: int, size: int, device: torch.device) -> None:
    mine = torch.full((8,), float(rank), device=device)
    listed = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(listed, mine)
    assert [int(each[0]) for each in listed] == list(range(size))
    flat = torch.empty(8 * size, device=device)
    dist.all_gather_into_tensor(flat, mine)
    assert flat.view(size, 8)[:, 0].tolist() == list(range(size))
    part = torch.empty(8, device=device)
    dist.reduce_scatter_tensor(part, flat)
    assert part.tolist() == [rank * size] * 8
    strided = torch.full((5,), float(rank), device=device)[::2]
    dist.broadcast(strided, size - 1)
    assert strided.tolist() == [size - 1.0] * 3
    sent, got = torch.arange(size, device=device).float() + 10 * rank, torch.empty(size, device=device)
    dist.all_to_all_single(got, sent)
    assert got.tolist() == [10.0 * each + rank for each in range(size)]
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(1 << 20, device=device)
    for work in (dist.irecv(got, left), dist.isend(torch.full((1 << 20,), float(rank), device=device), right)):
        work.wait()
    assert bool((got == left).all())


def check_streams_and_ddp(size: int, device: torch.device) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        tensor = torch.ones(1 << 16, device=device)
        tensor += 1
        dist.all_reduce(tensor)
        assert bool((tensor == 2 * size).all())
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    model(torch.randn(4, 64, device=device)).sum().backward()
    gradient = model.module.weight.grad
    gradients = [torch.empty_like(gradient) for _ in range(size)]
    dist.all_gather(gradients, gradient)
    assert all(torch.equal(each, gradients[0]) for each in gradients)


def measure(nbytes: int, device: torch.device) -> float:
    """Return the seconds of one all_reduce."""
    tensor, rounds = torch.zeros(nbytes // 4, device=device), 20 if nbytes <= 1 << 20 else 5
    for _ in range(2):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / rounds


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("mpi")
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", 0)
    check_sums(rank, size, device)
    check_moves(rank, size, device)
    check_streams_and_ddp(size, device)
    for nbytes in map(int, sys.argv[1:]):
        took = measure(nbytes, device)
        if rank == 0:
            print(f"staged all_reduce {nbytes} bytes: {took * 1e6:.0f} us, {nbytes / took / 1e9:.2f} GB/s", flush=True)
    dist.destroy_process_group()
    if rank == 0:
        print("OK staged")


if __name__ == "__main__":
    main()
