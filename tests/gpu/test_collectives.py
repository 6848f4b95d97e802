"""Every collective, dtype and op on CUDA tensors computes what the mathematics says, whatever library carries them."""

import pytest
import torch
import torch.distributed as c10d

import hpcdist as dist
from hpcdist.backends.nccl import calls
from hpcdist.backends.nccl.library import load
from hpcdist.c10d.coalescing import _coalescing_manager
from hpcdist.core.call_cache import LOOKS
from hpcdist.core.reduction import KIND_OF
from hpcdist.core.table import ALL_REDUCE, ROWS
from tests.mpi.expected import MOVING, OPS, PAIRS, ids, mathematics, same, values, widened
from tests.ranks import of_all_ranks

PREMULTIPLIED = [(dtype, "PREMUL_SUM") for dtype in KIND_OF if dtype.is_floating_point or dtype.is_complex]


def are_close(got, expected):
    """Whether results are equal, up to the roundings on the way of types that are rounded there."""
    got = got.cpu()
    if not (got.dtype.is_floating_point or got.dtype.is_complex) or got.itemsize >= 8:
        return torch.equal(got, expected)
    wide = widened(got.dtype)
    return torch.allclose(got.to(wide), expected.to(wide), rtol=0.13 if got.itemsize == 1 else 1e-2)


@pytest.mark.parametrize(("dtype", "name"), PAIRS + PREMULTIPLIED, ids=ids)
def test_reductions(group, dtype, name, rank, size, device):
    op = OPS[name] if name in OPS else c10d._make_nccl_premul_sum(0.5)
    try:
        group.backend(device).check_reduction(ALL_REDUCE, dtype, op)
    except RuntimeError as error:
        with pytest.raises(type(error), match=f"ReduceOp.{name}"):
            dist.all_reduce(values(rank, 5, dtype).to(device), op, group)
        return

    def expected(length):
        parts = [values(each, length, dtype) for each in range(size)]
        if name == "PREMUL_SUM":
            parts = [(part.to(widened(dtype)) * 0.5).to(dtype) for part in parts]
        return mathematics(parts, name)

    for each in [op] if name in OPS else [op, c10d._make_nccl_premul_sum(torch.tensor(0.5, device=device))]:
        tensor = values(rank, 5, dtype).to(device)
        dist.all_reduce(tensor, each, group)
        assert are_close(tensor, expected(5))
    for root in range(size):
        tensor = values(rank, 5, dtype).to(device)
        dist.reduce(tensor, root, op, group)
        assert are_close(tensor, expected(5) if rank == root else values(rank, 5, dtype))
    share = torch.empty(3, dtype=dtype, device=device)
    dist.reduce_scatter_single(share, values(rank, 3 * size, dtype).to(device), op, group)
    assert are_close(share, expected(3 * size)[3 * rank :][:3])
    uneven = [1 + each for each in range(size)]
    share = torch.empty(uneven[rank], dtype=dtype, device=device)
    dist.reduce_scatter(share, list(values(rank, sum(uneven), dtype).to(device).split(uneven)), op, group)
    assert are_close(share, expected(sum(uneven)).split(uneven)[rank])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", MOVING, ids=ids)
def test_moving_collectives(group, dtype, is_async, rank, size, device):
    def run(call, *args, **more):
        work = call(*args, **more, group=group, async_op=is_async)
        assert (work is not None) == is_async
        if is_async:
            work.wait()

    def empty(*shape):
        return torch.empty(shape, dtype=dtype, device=device)

    def all_same(got, expected):
        return all(same(one.cpu(), other) for one, other in zip(got, expected, strict=True))

    everyones = [values(each, 4, dtype) for each in range(size)]
    mine = everyones[rank].to(device)
    for root in range(size):
        strided = empty(4, 2)[:, 1]
        strided.copy_(mine)
        run(dist.broadcast, strided, root)
        assert same(strided.cpu(), everyones[root])
        gathered = [empty(4) for _ in range(size)] if rank == root else None
        run(dist.gather, mine, gathered, root)
        assert gathered is None or all_same(gathered, everyones)
        scattered = empty(4)
        run(dist.scatter, scattered, [each.to(device) for each in everyones] if rank == root else None, root)
        assert same(scattered.cpu(), everyones[rank])
    flat, exchanged = empty(4 * size), empty(4 * size)
    run(dist.all_gather_into_tensor, flat, mine)
    run(dist.all_to_all_single, exchanged, mine.view(torch.uint8).repeat(size).view(dtype))
    assert all_same(flat.chunk(size), everyones)
    assert all_same(exchanged.chunk(size), everyones)
    uneven = [each % 3 for each in range(size)]
    gathered, received = [empty(length) for length in uneven], [empty(length + uneven[rank]) for length in uneven]
    run(dist.all_gather, gathered, mine[: uneven[rank]])
    assert all_same(gathered, [each[:length] for each, length in zip(everyones, uneven, strict=True)])
    run(dist.all_to_all, received, [mine[: length + uneven[rank]] for length in uneven])
    assert all_same(received, [each[: len(got)] for each, got in zip(everyones, received, strict=True)])
    run(dist.barrier)


def test_an_older_nccl_gathers_and_scatters_by_messages(world, rank, size, device, monkeypatch):
    monkeypatch.setattr(world.backend("cuda"), "_library", load()._replace(version=(2, 27, 3)))
    group = dist.new_group()
    made = group.backend("cuda")._calls
    assert (made[ROWS["gather"]], made[ROWS["scatter"]]) == (calls.gather, calls.scatter)
    whole = torch.arange(3.0 * size, device=device).view(size, 3)
    for root in range(size):
        gathered = list(torch.empty(size, 3, device=device)) if rank == root else None
        dist.gather(whole[rank], gathered, root, group)
        assert gathered is None or torch.equal(torch.stack(gathered), whole)
        share = torch.empty(3, device=device)
        dist.scatter(share, list(whole + root) if rank == root else None, root, group)
        assert torch.equal(share, whole[rank] + root)
        gathered = torch.zeros(size, 3, device=device)
        gathered[rank] = whole[rank]  # in place
        options = c10d.GatherOptions()
        options.rootRank = root
        group.gather_single(gathered, gathered[rank], options).wait()
        assert rank != root or torch.equal(gathered, whole)
    dist.destroy_process_group(group)


def test_in_place_empty_strided_and_large(group, rank, size, device):
    whole = torch.full((size, 4), float(rank), device=device)
    dist.all_gather_into_tensor(whole, whole[rank], group)
    assert whole[:, 0].tolist() == list(range(size))
    exchanged = torch.arange(size, dtype=torch.float32, device=device) + size * rank
    dist.all_to_all_single(exchanged, exchanged, group=group)
    assert exchanged.tolist() == [peer * size + rank for peer in range(size)]
    dist.all_reduce(torch.empty(0, device=device), group=group)
    strided = torch.full((3, 5), float(rank), device=device).t()
    dist.all_reduce(strided, group=group)
    assert bool((strided == sum(range(size))).all())
    large = torch.ones(1 << 24, device=device)
    dist.all_reduce(large, group=group)
    assert bool((large == size).all())


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("place", ["own", "next", "across"])
def test_input_and_output_that_share_memory(group, is_async, place, rank, size, device):
    length, everyones = 3, [torch.arange(3.0) + 10 * each for each in range(size)]
    start = {
        "own": rank * length,
        "next": (rank + 1) % size * length,
        "across": (rank * length + 1) % (size * length - 2),
    }

    def run(call, *args):
        work = call(*args, group=group, async_op=is_async)
        if work is not None:
            work.wait()

    for _ in range(2 * LOOKS):  # a call that comes again goes another way
        whole = torch.empty(size * length, device=device)
        share = whole[start[place] :][:length]
        share.copy_(everyones[rank])
        run(dist.all_gather_into_tensor, whole, share)
        assert whole.tolist() == torch.cat(everyones).tolist()
        whole = torch.arange(float(size * length), device=device) + rank
        share = whole[start[place] :][:length]
        run(dist.reduce_scatter_tensor, share, whole)
        assert share.tolist() == [size * (rank * length + each) + sum(range(size)) for each in range(length)]
        memory = torch.arange(2.0 * size, device=device) + 100 * rank
        run(dist.all_to_all_single, memory[size // 2 :][:size], memory[:size])
        assert memory[size // 2 :][:size].tolist() == [100 * each + rank for each in range(size)]


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_without_elements(group, is_async, rank, size, device):
    """No rank leaves a call out that another one makes."""
    empty, work = torch.empty(2, 0, device=device), None
    for root in range(size):
        gathered = [torch.empty(2, 0, device=device) for _ in range(size)] if rank == root else None
        dist.gather(empty, gathered, root, group, is_async)
        dist.scatter(torch.empty(2, 0, device=device), gathered, root, group, is_async)
        sent = torch.arange(float(size), device=device) if rank == root else torch.empty(0, device=device)
        received = torch.empty(1, device=device)
        splits = [int(each == root) for each in range(size)], [int(rank == root)] * size
        work = dist.all_to_all_single(received, sent, *splits, group=group, async_op=is_async)
        if is_async:
            work.wait()
        assert received.tolist() == [rank]


def test_the_first_call_is_an_exchange_in_which_a_rank_has_no_part(group, rank, size, device):
    """It connects the ranks, that one too."""
    made = dist.new_group(backend=group.config)
    nothing, last = torch.empty(0, device=device), size - 1
    sizes = [int(rank != last and each != last) for each in range(size)]
    received = torch.empty(sum(sizes), device=device)
    dist.all_to_all_single(received, torch.ones(sum(sizes), device=device), sizes, sizes, group=made)
    dist.barrier()
    assert received.tolist() == [1] * sum(sizes)
    dist.all_to_all_single(nothing, nothing, [0] * size, [0] * size, group=made)
    dist.destroy_process_group(made)


def test_what_a_rank_stages_does_not_order_calls_that_are_launched_together(group, rank, size, device):
    for _ in range(2):
        whole, total = torch.empty(size * 3, device=device), torch.full((3,), float(rank), device=device)
        share = whole[(rank + 1) % size * 3 :][:3] if rank == 0 else torch.empty(3, device=device)
        share.fill_(rank)
        with _coalescing_manager(group, device, async_ops=True) as manager:
            dist.all_gather_into_tensor(whole, share, group)
            dist.all_reduce(total, group=group)
        manager.wait()
        assert whole.view(size, 3)[:, 0].tolist() == list(range(size))
        assert total.tolist() == [sum(range(size))] * 3


def test_a_list_of_tensors_on_several_devices(group, rank, size, device):
    mine, mixed = torch.zeros(3, device=device), [torch.zeros(3), *(torch.zeros(3, device=device) for _ in range(size))]
    mixed = mixed[:size]
    calls = [
        lambda: dist.reduce_scatter(mine, mixed, group=group),
        lambda: dist.scatter(mine, mixed, rank, group),
        lambda: dist.gather(mine, mixed, rank, group),
        lambda: dist.all_gather(mixed, mine, group),
        lambda: dist.all_to_all(mixed, [mine] * size, group),
        lambda: dist.all_to_all([mine] * size, mixed, group),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"on (the same|one) device"):
            call()


def test_objects_do_not_touch_the_gpu(group, rank, size, device):
    torch.cuda.synchronize()
    group.backend(device).outstanding()  # lets go of what earlier calls held
    before = torch.cuda.memory_allocated()
    everyones = of_all_ranks({"rank": rank}, group)
    assert everyones == [{"rank": each} for each in range(size)]
    assert torch.cuda.memory_allocated() == before


def test_cpu_and_cuda_tensors_in_one_group(group, rank, size, device):
    on_cpu, on_gpu = torch.ones(3), torch.ones(3, device=device)
    for work in [dist.all_reduce(each, group=group, async_op=True) for each in (on_cpu, on_gpu)]:
        work.wait()
    assert on_cpu.tolist() == on_gpu.tolist() == [size] * 3
