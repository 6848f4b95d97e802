"""A default device, such as ``torch.set_default_device("cuda")`` sets, does not reach what we make for ourselves."""

from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp

import hpcdist as dist


def full(value, *shape, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype, device="cpu")


CALLS = {
    "all_reduce": lambda r, n: dist.all_reduce(full(1, 5)),
    "large": lambda r, n: dist.all_reduce(full(1, 1 << 20)),
    "half": lambda r, n: dist.all_reduce(full(1, 9, dtype=torch.bfloat16)),
    "large half": lambda r, n: dist.all_reduce(full(1, 1 << 20, dtype=torch.float16), ReduceOp.AVG),
    "large complex half": lambda r, n: dist.all_reduce(full(1, 1 << 18, dtype=torch.complex32), ReduceOp.PRODUCT),
    "half, scattered": lambda r, n: dist.reduce_scatter_single(
        full(0, 7, dtype=torch.float16), full(1, 7 * n, dtype=torch.float16)
    ),
    "premultiplied": lambda r, n: dist.all_reduce(full(1, 5), dist._make_nccl_premul_sum(2.0)),
    "strided": lambda r, n: dist.broadcast(full(1, 5, 2)[:, 0], 0),
    "sparse": lambda r, n: dist.all_reduce(full(1, 3, 2).to_sparse()),
    "coalesced": lambda r, n: dist.all_reduce_coalesced([full(1, 5) for _ in range(3)]),
    "coalesced, later": lambda r, n: dist.all_reduce_coalesced([full(1, 5), full(1, 6)], async_op=True).wait(),
    "lists": lambda r, n: dist.all_gather([full(0, 3) for _ in range(n)], full(1, 3)),
    "lists to all": lambda r, n: dist.all_to_all([full(0, 3) for _ in range(n)], [full(1, 3) for _ in range(n)]),
    "scatter": lambda r, n: dist.scatter(full(0, 3), [full(1, 3) for _ in range(n)] if r == 0 else None, 0),
    "node-shared": lambda r, n: dist.node_shared(5, fill=lambda tensor: tensor.copy_(full(1, 5))),
    "objects": lambda r, n: dist.all_gather_object([None] * n, {"array": full(1, 1000)}),
    "an object for all": lambda r, n: dist.broadcast_object_list([{"tensor": full(1, 3)}], 0),
    "to itself": lambda r, n: [
        work.wait()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, full(1, 3), r), dist.P2POp(dist.irecv, full(0, 3), r)]
        )
    ],
    "monitored": lambda r, n: dist.monitored_barrier(timeout=timedelta(seconds=60)),
    "a group": lambda r, n: dist.destroy_process_group(dist.new_group(list(range(n)))),
}


@pytest.mark.parametrize("call", CALLS)
def test_under_a_default_device(call, rank, size):
    with torch.device("meta"):  # which has no memory at all
        for _ in range(3):
            CALLS[call](rank, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64])
def test_sums_under_a_default_device(dtype, rank, size):
    tensor = full(rank, 1 << 18, dtype=dtype)
    parts = full(rank, 1 << 10, size, dtype=dtype).view(-1)
    part = full(0, 1 << 10, dtype=dtype)
    with torch.device("meta"):
        dist.all_reduce(tensor)
        dist.reduce_scatter_single(part, parts)
    total = size * (size - 1) // 2
    assert bool((tensor == total).all())
    assert bool((part == total).all())
