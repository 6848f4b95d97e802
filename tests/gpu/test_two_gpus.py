"""One rank with tensors on two GPUs: NCCL refuses the other GPU's, and MPI carries both."""

import pytest
import torch

import hpcdist as dist

SLEEP_CYCLES = 100_000_000
COUNT = 10_000


@pytest.fixture
def other(device, emulation):
    """A second GPU, which this rank does not own; ``test_violations`` wants the next one untouched."""
    emulation.contexts_anywhere = True
    yield torch.device("cuda", (device.index - 1) % torch.cuda.device_count())
    emulation.contexts_anywhere = False
    torch.cuda.set_device(device)


def test_nccl_refuses_a_tensor_on_another_gpu(rank, size, device, other):
    here, large = torch.ones(4, device=device), torch.ones(4 * size, device=device)
    torch.cuda.set_device(other)
    there, larger = torch.ones(4, device=other), torch.ones(4 * size, device=other)
    torch.cuda.set_device(device)
    dist.all_reduce(here)
    for call in (
        lambda: dist.all_reduce(there),
        lambda: dist.all_reduce(there, async_op=True),
        lambda: dist.all_gather_into_tensor(larger, here),
        lambda: dist.all_gather_into_tensor(large, there),
        lambda: torch.distributed.broadcast(there, 0),
        lambda: torch.distributed.reduce_scatter_tensor(there, large),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, here, rank), dist.P2POp(dist.irecv, there, rank)]),
    ):
        with pytest.raises(dist.DistBackendError) as error:
            call()
        assert f"on {other}" in str(error.value)
        assert f"on {device}" in str(error.value)
    if size > 1:
        with pytest.raises(ValueError, match="on the same device; found"):
            dist.all_gather([torch.empty(4, device=(device, other)[each % 2]) for each in range(size)], here)
    here.fill_(1)
    for _ in range(40):
        dist.all_reduce(here, dist.ReduceOp.MAX)
    assert here.tolist() == [1] * 4


def test_an_asynchronous_call_looks_for_a_capture_on_its_own_gpu(world, size, device, other, monkeypatch):
    tensor, streams, seen = torch.ones(4, device=device), world.backend("cuda").communicators.group.streams, []
    monkeypatch.setattr(streams, "is_capturing", lambda: bool(seen.append(torch.cuda.current_device())))
    torch.cuda.set_device(other)
    work = dist.all_reduce(tensor, async_op=True)
    torch.cuda.set_device(device)
    work.wait()
    assert set(seen) == {device.index}
    assert tensor.tolist() == [size] * 4


@pytest.mark.parametrize("is_async", [False, True])
def test_torchs_library_refuses_one_call_on_two_gpus(is_async, rank, size, device, other):
    group = dist.new_group(backend="cpu:mpi,cuda:torch")
    here, large = torch.ones(4, device=device), torch.ones(4 * size, device=device)
    torch.cuda.set_device(other)
    there, larger = torch.ones(4, device=other), torch.ones(4 * size, device=other)
    torch.cuda.set_device(device)
    for call in (
        lambda: dist.all_gather_into_tensor(larger, here, group, is_async),
        lambda: dist.all_gather_into_tensor(large, there, group, is_async),
        lambda: dist.reduce_scatter_tensor(there, large, dist.ReduceOp.SUM, group, is_async),
        lambda: dist.all_to_all_single(larger, large, None, None, group, is_async),
    ):
        with pytest.raises(dist.DistBackendError) as error:
            call()
        assert f"on {other}" in str(error.value)
        assert f"on {device}" in str(error.value)
    if size > 1:  # a refused call is none that the other ranks have to make
        assert group.backend("cuda").call_log().number == 0
    dist.all_gather_into_tensor(large, here, group)
    assert large.tolist() == [1] * 4 * size
    dist.destroy_process_group(group)


def test_mpi_carries_tensors_of_two_gpus_side_by_side(rank, size, device, other):
    group = dist.new_group(backend="mpi")
    streams, begun = [], []
    for number, each in enumerate((device, other)):
        torch.cuda.set_device(each)
        streams.append(torch.cuda.Stream())
        with torch.cuda.stream(streams[-1]):
            torch.cuda._sleep(SLEEP_CYCLES)
            tensor = torch.full((2 * COUNT,), float(rank + number), device=each)[::2]
            begun.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, number))
    for work, tensor, number in begun:
        work.wait()
        torch.cuda.set_device(tensor.device)
        assert tensor.cpu().unique().tolist() == [sum(range(size)) + size * number]
    torch.cuda.set_device(other)
    tensor = torch.full((3,), float(rank), device=other)
    received = torch.empty(3, device=other)
    torch.cuda.set_device(device)
    works = [dist.irecv(received, (rank - 1) % size, group), dist.isend(tensor, (rank + 1) % size, group)]
    for work in works:
        work.wait()
    torch.cuda.set_device(other)
    assert received.tolist() == [(rank - 1) % size] * 3
    for stream in streams:
        stream.synchronize()
    dist.destroy_process_group(group)
