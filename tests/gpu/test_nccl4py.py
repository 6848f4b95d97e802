"""nccl4py by itself, without hpcdist between: the library that the backend calls does what the tests rely on."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

import hpcdist as dist

nccl = pytest.importorskip("nccl.core")


def share(world, value):
    return world.cpu.objects.broadcast(value, 0)


@pytest.fixture
def comm(world, rank, size, device):
    unique_id = nccl.UniqueId.from_bytes(share(world, bytes(nccl.get_unique_id())))
    made = nccl.Communicator.init(size, rank, unique_id)
    yield made
    torch.cuda.synchronize()
    if made.is_valid:
        made.destroy()


@pytest.fixture
def stream(device):
    return torch.cuda.current_stream().cuda_stream


def test_collectives(comm, stream, rank, size, device):
    assert (comm.rank, comm.nranks) == (rank, size)
    total = float(size * (size + 1) // 2)
    tensor = torch.full((10,), rank + 1.0, device=device)
    comm.allreduce(tensor, tensor, nccl.SUM, stream=stream)
    assert tensor.tolist() == [total] * 10
    comm.broadcast(tensor, tensor, 0, stream=stream)
    gathered = torch.empty(10 * size, device=device)
    comm.allgather(tensor, gathered, stream=stream)
    assert gathered.tolist() == [total] * 10 * size
    part = torch.empty(2, device=device)
    comm.reduce_scatter(torch.ones(2 * size, device=device), part, nccl.SUM, stream=stream)
    assert part.tolist() == [size] * 2
    sent = torch.arange(size, device=device).float() + rank * size
    received = torch.empty_like(sent)
    comm.alltoall(sent, received, stream=stream)
    assert received.tolist() == [peer * size + rank for peer in range(size)]


def test_a_group_of_messages(comm, stream, rank, size, device):
    sent, received = torch.full((3,), float(rank), device=device), torch.empty(3, device=device)
    with nccl.group():  # nothing is launched before its end: what is sent must live until then
        comm.send(sent, (rank + 1) % size, stream=stream)
        comm.recv(received, (rank - 1) % size, stream=stream)
    assert received.tolist() == [(rank - 1) % size] * 3


def test_a_factor(comm, stream, rank, size, device):
    op = comm.create_pre_mul_sum(np.array([0.5], dtype=np.float32), nccl.FLOAT32)
    tensor = torch.ones(4, device=device)
    comm.allreduce(tensor, tensor, op, stream=stream)
    assert tensor.tolist() == [size / 2] * 4


def test_split_and_shrink(comm, stream, rank, size, device):
    child = comm.split(rank % 2, rank)
    tensor = torch.ones(1, device=device)
    child.allreduce(tensor, tensor, nccl.SUM, stream=stream)
    assert tensor.item() == child.nranks == len(range(rank % 2, size, 2))
    child.destroy()
    none = comm.split(0 if rank == 0 else None, 0)
    assert none.is_valid == (rank == 0)
    if rank == 0:
        none.destroy()
    if size > 1 and rank != size - 1 and nccl.get_version().libnccl.version.release >= (2, 27):
        smaller = comm.shrink([size - 1])
        smaller.allreduce(tensor.fill_(1), tensor, nccl.SUM, stream=stream)
        assert tensor.item() == size - 1
        smaller.destroy()


def test_an_abort_ends_a_call_that_the_others_do_not_make(two_ranks, comm, rank, device):
    assert int(comm.get_async_error()) == 0
    if rank == 0:
        side = torch.cuda.Stream()
        tensor = torch.ones(1, device=device)
        torch.cuda.synchronize()
        comm.allreduce(tensor, tensor, nccl.SUM, stream=side.cuda_stream)
        time.sleep(0.2)
        assert not side.query()
        began = time.monotonic()
        threading.Timer(0.3, comm.abort).start()
        side.synchronize()
        assert time.monotonic() - began > 0.1
        time.sleep(0.5)
    else:
        comm.abort()
    dist.barrier()


def test_host_memory_is_refused(comm, stream):
    with pytest.raises(Exception, match=r"device|invalid"):
        comm.allreduce(torch.ones(1), torch.ones(1), nccl.SUM, stream=stream)
