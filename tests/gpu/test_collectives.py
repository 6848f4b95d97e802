"""Every collective, dtype and op that NCCL has: the results on the GPU are those of MPI on the CPU."""

from __future__ import annotations

import pytest
import torch

import hpcdist as dist
from hpcdist.backends.nccl import datatypes
from hpcdist.core.reduction import KIND_OF
from hpcdist.core.table import ALL_REDUCE

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def op_of(name):
    return torch.distributed._make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def values(dtype, rank, count=12):
    """Small numbers, whose sums and products every dtype here holds exactly."""
    numbers = (torch.arange(count) + rank) % 2 + 1
    return numbers.to(torch.float32).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def close(got, expected):
    got, expected = got.cpu(), expected.cpu()
    if got.dtype is torch.bool or not (got.dtype.is_floating_point or got.dtype.is_complex):
        return torch.equal(got, expected)
    wide = torch.complex64 if got.dtype is torch.complex32 else torch.float32 if got.itemsize < 4 else got.dtype
    return torch.allclose(got.to(wide), expected.to(wide), rtol=0.13 if got.itemsize == 1 else 1e-2)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", KIND_OF, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_all_reduce_reduce_and_reduce_scatter(dtype, name, rank, size, device):
    op = op_of(name)
    on_gpu = values(dtype, rank).to(device)
    backend = dist.group.WORLD.backend("cuda")
    try:
        backend.check_reduction(ALL_REDUCE, dtype, op)
    except (RuntimeError, ValueError) as error:
        with pytest.raises(type(error)):
            dist.all_reduce(on_gpu, op)
        return
    expected = values(dtype, rank)
    dist.all_reduce(expected, op)
    dist.all_reduce(on_gpu, op)
    assert close(on_gpu, expected)
    for root in range(size):
        reduced = values(dtype, rank).to(device)
        dist.reduce(reduced, root, op)
        assert close(reduced, expected if rank == root else values(dtype, rank))
    many = torch.cat([values(dtype, rank)] * size)
    shares, share = torch.empty(12, dtype=dtype), torch.empty(12, dtype=dtype, device=device)
    dist.reduce_scatter_single(shares, many, op)
    dist.reduce_scatter_single(share, many.to(device), op)
    assert close(share, shares)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [*datatypes.DATATYPES, torch.int16, torch.complex64, torch.float8_e4m3fnuz], ids=str)
def test_moving_collectives(dtype, is_async, rank, size, device):
    def done(work):
        if is_async:
            work.wait()

    mine = values(dtype, rank).to(device)
    everyones = [values(dtype, each) for each in range(size)]
    for root in range(size):
        tensor = mine.clone()
        done(dist.broadcast(tensor, root, async_op=is_async))
        assert close(tensor, everyones[root])
        gathered = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
        done(dist.gather(mine, gathered, root, async_op=is_async))
        if gathered is not None:
            assert all(close(got, expected) for got, expected in zip(gathered, everyones, strict=True))
        scattered = torch.empty_like(mine)
        parts = [each.to(device) for each in everyones] if rank == root else None
        done(dist.scatter(scattered, parts, root, async_op=is_async))
        assert close(scattered, everyones[rank])
    flat = torch.empty(12 * size, dtype=dtype, device=device)
    done(dist.all_gather_into_tensor(flat, mine, async_op=is_async))
    assert all(close(got, expected) for got, expected in zip(flat.chunk(size), everyones, strict=True))
    outputs = [torch.empty_like(mine) for _ in range(size)]
    done(dist.all_to_all(outputs, [mine.clone() for _ in range(size)], async_op=is_async))
    assert all(close(got, expected) for got, expected in zip(outputs, everyones, strict=True))


def test_shares_of_different_sizes(rank, size, device):
    outputs = [torch.empty(each, device=device) for each in range(size)]
    dist.all_gather(outputs, torch.full((rank,), float(rank), device=device))
    assert all(bool((got == each).all()) for each, got in enumerate(outputs))
    share = torch.empty(rank + 1, device=device)
    dist.reduce_scatter(share, [torch.full((each + 1,), 1.0 + rank, device=device) for each in range(size)])
    assert bool((share == sum(range(1, size + 1))).all())
    sent = [torch.full((rank + peer,), float(rank), device=device) for peer in range(size)]
    received = [torch.empty(rank + peer, device=device) for peer in range(size)]
    dist.all_to_all(received, sent)
    assert all(bool((got == peer).all()) for peer, got in enumerate(received))


def test_in_place_empty_strided_and_large(rank, size, device):
    whole = torch.full((size, 4), float(rank), device=device)
    dist.all_gather_into_tensor(whole, whole[rank])
    assert whole[:, 0].tolist() == list(range(size))
    exchanged = torch.arange(size, dtype=torch.float32, device=device) + size * rank
    dist.all_to_all_single(exchanged, exchanged)
    assert exchanged.tolist() == [peer * size + rank for peer in range(size)]
    dist.all_reduce(torch.empty(0, device=device))
    strided = torch.full((3, 5), float(rank), device=device).t()
    dist.all_reduce(strided)
    assert bool((strided == sum(range(size))).all())
    large = torch.ones(1 << 26, device=device)
    dist.all_reduce(large)
    assert bool((large == size).all())


def test_objects_do_not_touch_the_gpu(rank, size):
    torch.cuda.synchronize()
    dist.group.WORLD.backend("cuda").outstanding()  # lets go of what earlier calls held
    before = torch.cuda.memory_allocated()
    everyones = [None] * size
    dist.all_gather_object(everyones, {"rank": rank})
    assert [each["rank"] for each in everyones] == list(range(size))
    assert torch.cuda.memory_allocated() == before


def test_cpu_and_cuda_tensors_in_one_group(rank, size, device):
    on_cpu, on_gpu = torch.ones(3), torch.ones(3, device=device)
    works = [dist.all_reduce(each, async_op=True) for each in (on_cpu, on_gpu)]
    for work in works:
        work.wait()
    assert on_cpu.tolist() == on_gpu.tolist() == [size] * 3
