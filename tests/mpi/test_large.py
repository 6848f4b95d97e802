"""More than 2^31 - 1 elements travel, although MPI counts in C ints."""

import os

import pytest
import torch

import hpcdist as dist

pytestmark = pytest.mark.skipif(
    "HPCDIST_TEST_LARGE" not in os.environ, reason="takes 15 GiB on two ranks; set HPCDIST_TEST_LARGE=1"
)
OVER = 2**31 + 5


def test_all_reduce_and_broadcast(rank, size):
    tensor = torch.full((OVER,), 1 + rank, dtype=torch.uint8)
    dist.all_reduce(tensor)
    assert tensor[0] == tensor[2**30] == tensor[-1] == size * (size + 1) // 2
    tensor.fill_(rank)
    dist.broadcast(tensor, size - 1)
    assert tensor[0] == tensor[-1] == size - 1


def test_messages(rank, size):
    if rank == 0:
        dist.isend(torch.full((OVER,), 3, dtype=torch.uint8), size - 1).wait() if size > 1 else None
    elif rank == size - 1:
        tensor = torch.zeros(OVER, dtype=torch.uint8)
        dist.recv(tensor, 0)
        assert tensor[0] == tensor[-1] == 3
    dist.barrier()


def test_gather_and_exchange(rank, size):
    output = torch.zeros(OVER + size - 1, dtype=torch.uint8)
    shares = [OVER] + [1] * (size - 1)
    outputs = list(output.split(shares))
    dist.all_gather(outputs, torch.full((shares[rank],), rank + 1, dtype=torch.uint8))
    assert outputs[0][-1] == 1
    assert all(outputs[r].item() == r + 1 for r in range(1, size))
    del output, outputs
    if size == 2:  # rank 0 sends itself almost everything
        sent = [[OVER, 1], [2, 3]]
        received = [[OVER, 2], [1, 3]]
        data = torch.full((sum(sent[rank]),), 5 + rank, dtype=torch.uint8)
        output = torch.zeros(sum(received[rank]), dtype=torch.uint8)
        dist.all_to_all_single(output, data, received[rank], sent[rank])
        assert output[0] == 5
        assert output[-1] == 6
