"""Rules broken on purpose: the emulated GPUs notice each, so that silence in the other tests means something."""

import ctypes
import threading
import time

import pytest
import torch

import hpcdist as dist
from hpcdist.backends.nccl.library import load
from tests.ranks import of_all_ranks

SLEEP_CYCLES = 50_000_000


@pytest.fixture
def noted(emulation):
    """Return what is noted, once the device has ended what was queued."""

    def take():
        torch.cuda.synchronize()
        return emulation.take_violations()

    return take


def test_memory_that_is_given_back_while_another_stream_uses_it(noted, device):
    side = torch.cuda.Stream()
    tensor = torch.ones(1000, device=device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        tensor * 2
    del tensor
    assert "was given back" in noted()


@pytest.mark.parametrize("way", ["record_stream", "wait_stream", "host"])
def test_memory_that_is_given_back_in_order(way, noted, device):
    side = torch.cuda.Stream()
    tensor = torch.ones(1000, device=device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        tensor * 2
    if way == "record_stream":
        tensor.record_stream(side)
    elif way == "wait_stream":
        torch.cuda.current_stream().wait_stream(side)
    else:
        side.synchronize()
    del tensor
    assert noted() == ""


@pytest.mark.parametrize("is_ordered", [False, True])
def test_memory_that_two_streams_use(is_ordered, noted, device):
    side, tensor = torch.cuda.Stream(), torch.zeros(1000, device=device)
    side.wait_stream(torch.cuda.current_stream())
    tensor + 1  # both only read it
    with torch.cuda.stream(side):
        tensor + 1
    assert noted() == ""
    tensor += 1
    if is_ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = tensor * 2
    assert ("nothing orders the two" in noted()) is not is_ordered
    del doubled


def test_the_host_waits_for_streams_that_the_default_one_comes_after(noted, device):
    runtime, handle = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    assert runtime.cudaStreamCreate(ctypes.byref(handle)) == 0
    side, tensor = torch.cuda.Stream(), torch.zeros(1000, device=device)
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        tensor += 1
    assert runtime.cudaStreamSynchronize(None) == 0
    with torch.cuda.stream(side):
        tensor += 1
    side.synchronize()
    assert noted() == ""
    assert runtime.cudaStreamDestroy(handle) == 0


def test_parts_of_one_launch_that_use_the_same_memory(noted, alone, device):
    library, tensor = load(), torch.ones(6, device=device)
    bindings, handle, place = library.bindings, library.bindings.Comm(alone.ptr), tensor.data_ptr()
    torch.cuda.synchronize()
    bindings.all_reduce(place, place, 3, 7, 0, handle, 0)
    assert noted() == ""
    bindings.all_reduce(place, place + 4, 3, 7, 0, handle, 0)
    with library.core.group():
        bindings.all_reduce(place, place, 3, 7, 0, handle, 0)
        bindings.all_reduce(place + 8, place + 8, 3, 7, 0, handle, 0)
    text = noted()
    assert "which it of the same launch uses too" in text
    assert "which all_reduce of the same launch uses too" in text
    alone.destroy()


def test_a_communicator_that_is_used_after_its_end(noted, alone, device):
    tensor = torch.ones(3, device=device)
    bindings = load().bindings
    handle = bindings.Comm(alone.ptr)
    alone.destroy()
    with pytest.raises(bindings.NCCLError):
        bindings.all_reduce(tensor.data_ptr(), tensor.data_ptr(), 3, 7, 0, handle, 0)
    bindings.comm_get_async_error(handle)
    assert noted().count("use after free") == 2


def test_a_context_on_a_foreign_device(noted, device):
    foreign = (device.index + 1) % torch.cuda.device_count()
    thread = threading.Thread(target=torch.cuda.set_device, args=(foreign,))
    thread.start()
    thread.join()
    assert f"made a context on device {foreign}" in noted()


def test_calls_of_two_ranks_that_do_not_match(two_ranks, connect, noted, rank, size, device):
    group = connect()
    work = dist.all_reduce(torch.ones(3 if rank == 0 else 5, device=device), group=group, async_op=True)
    backend = group.backend("cuda")
    noticed = [None] * size
    for _ in range(1000):  # the rank that does not notice hangs, as NCCL's would
        dist.all_gather_object(noticed, str(backend.faults.check_async() or ""))
        if any(noticed):
            break
        time.sleep(0.02)
    backend.faults.interrupt("".join(noticed))
    with pytest.raises(dist.DistBackendError):
        work.wait()
    everyones = of_all_ranks(noted())
    assert any("calls do not match" in each for each in everyones)


def test_a_capture_that_a_stream_does_not_leave(noted, device):
    main, side = torch.cuda.Stream(), torch.cuda.Stream()  # one after the other, because torch has 32 in all
    tensor = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()

    def capture():
        with torch.cuda.graph(graph, stream=main):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                tensor.mul_(2)

    with pytest.raises(RuntimeError, match="Unjoined"):
        capture()
    assert "was not joined back" in noted()
