"""torch.profiler sees collectives: name, shape of the input, and when they end."""

import time

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import hpcdist as dist


def events(run, **arguments):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, **arguments) as profiler:
        run()
    backend = dist.get_backend()
    return {each.name: each for each in profiler.events() if each.name.startswith((f"{backend}:", "my "))}


@pytest.fixture
def backend(world):
    return dist.get_backend()


def test_every_collective_leaves_an_event(backend, rank, size):
    def run():
        dist.all_reduce(torch.ones(3, 4))
        dist.broadcast(torch.ones(5), src=0)
        dist.all_gather_single(torch.empty(2 * size), torch.ones(2))
        dist.reduce_scatter_single(torch.empty(2), torch.ones(2 * size))
        dist.all_to_all_single(torch.empty(size), torch.ones(size))
        dist.barrier()
        dist.reduce(torch.ones(6), dst=0)
        dist.gather(torch.ones(7), [torch.empty(7) for _ in range(size)] if rank == 0 else None, dst=0)

    found = events(run)
    shapes = {
        "all_reduce": [[3, 4]],
        "broadcast": [[5]],
        "all_gather": [[2]],
        "reduce_scatter": [[2 * size]],
        "all_to_all": [[size]],
        "barrier": [],
        "reduce": [[6]],
        "gather": [[7]],
    }
    assert {name: found[f"{backend}:{name}"].input_shapes for name in shapes} == shapes
    assert all(found[f"{backend}:{name}"].is_async for name in shapes)


SIZES = [(3, 4), (5,), (1 << 17,)]  # the last is reduced by a call of its own


def gather_lists(size):
    return [[torch.empty(each) for each in SIZES] for _ in range(size)]


# c10d's event of a list of tensors -> the call
JOINED = {
    "all_reduce facade": lambda inputs, size, way: dist.all_reduce_coalesced(inputs, **way),
    "all_reduce torch": lambda inputs, size, way: torch_dist.all_reduce_coalesced(inputs, **way),
    "all_gather facade": lambda inputs, size, way: dist.all_gather_coalesced(gather_lists(size), inputs, **way),
    "all_gather torch": lambda inputs, size, way: torch_dist.all_gather_coalesced(gather_lists(size), inputs, **way),
}


@pytest.mark.parametrize("call", JOINED)
@pytest.mark.parametrize("way", ["sync", "wait", "future"])
def test_joined_calls_are_one_event_with_the_shape_of_each(backend, size, call, way):
    def run():
        work = JOINED[call]([torch.ones(each) for each in SIZES], size, {} if way == "sync" else {"async_op": True})
        if way == "wait":
            work.wait()
        elif way == "future":
            getattr(work, "get_future", lambda: work)().wait()  # torch's all_reduce_coalesced returns the future

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    shapes = [each.input_shapes for each in profiler.events() if each.name.startswith(f"{backend}:")]
    assert shapes == [[list(each) for each in SIZES]]


def test_a_joined_event_ends_with_its_last_call_though_nobody_waits(backend, rank, size):
    looks = []  # at the call, before it had ended

    def run():
        time.sleep(0.2 if rank else 0)
        work = dist.all_gather_coalesced(gather_lists(size), [torch.ones(each) for each in SIZES], async_op=True)
        looks.append(time.perf_counter())
        while not work.is_completed():
            time.sleep(0.01)
            looks.append(time.perf_counter())

    event = events(run)[f"{backend}:all_gather"]
    under_way = looks[-2] - looks[0] if len(looks) > 1 else 0.0  # the last look found that it had ended
    assert event.cpu_time_total > 0.99e6 * under_way


CALLS = {
    "facade": lambda **way: dist.all_reduce(torch.ones(2, 2), **way),
    "torch": lambda **way: torch_dist.all_reduce(torch.ones(2, 2), **way),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, CommDebugMode])
def test_an_asynchronous_call_is_one_asynchronous_event(backend, call, is_late, mode):
    def run():
        with mode():
            work = CALLS[call](async_op=True)
            if is_late:
                time.sleep(0.02)  # its thread has carried it out
            work.wait()

    event = events(run)[f"{backend}:all_reduce"]
    assert (event.input_shapes, event.is_async, event.count) == ([[2, 2]], True, 1)
    assert event.cpu_time >= 0


def test_an_asynchronous_event_ends_with_its_operation(backend, rank):
    waited = []

    def run():
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            began = time.perf_counter()
            work.wait()
            waited.append(time.perf_counter() - began)
        else:
            time.sleep(0.2)
            dist.all_reduce(torch.ones(3))

    found = events(run)
    if rank == 0 and dist.get_world_size() > 1:
        assert found[f"{backend}:all_reduce"].cpu_time_total > 0.5e6 * waited[0]


def test_messages(backend, rank, size):
    def run():
        sent = dist.isend(torch.ones(3), dst=(rank + 1) % size)
        dist.irecv(torch.empty(3), src=(rank - 1) % size).wait()
        sent.wait()

    found = events(run)
    assert found[f"{backend}:send"].input_shapes == [[3]]
    assert found[f"{backend}:recv"].input_shapes == [[3]]
    assert found[f"{backend}:send"].is_async
    assert found[f"{backend}:recv"].is_async


def test_blocking_messages(two_ranks, backend, rank):
    for library in (dist, torch_dist):

        def run(library=library):
            if rank == 0:
                library.send(torch.ones(3), dst=1)
                library.recv(torch.empty(2), src=1)
            elif rank == 1:
                library.recv(torch.empty(3), src=0)
                library.send(torch.ones(2), dst=0)

        found = events(run)
        if rank < 2:
            assert found[f"{backend}:send"].input_shapes == [[3 - rank]]
            assert found[f"{backend}:recv"].input_shapes == [[2 + rank]]
            assert found[f"{backend}:send"].is_async
            assert found[f"{backend}:recv"].is_async


def test_a_name_of_its_own(backend):
    def run():
        with dist.record_comm("my collective"):
            dist.all_reduce(torch.ones(2))

    assert set(events(run)) == {"my collective"}


def test_no_event_without_a_profiler(backend):
    dist.all_reduce(torch.ones(2))
    assert events(lambda: None) == {}


def test_profile_sees_torchs_functions_and_ddp_and_torchs_profiler_beside_it(backend, rank, size):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 4))
    with dist.profile(show=False) as seen:
        found = events(lambda: torch_dist.all_reduce(torch.ones(2, 2)))
        model(torch.ones(2, 3)).sum().backward()
    assert found[f"{backend}:all_reduce"].input_shapes == [[2, 2]]
    reduced = {call.nbytes: call for call in seen.calls if call.name == "all_reduce" and call.kind == "collective"}
    assert reduced.keys() == {16, 64}  # torch's, and the bucket of 3 * 4 + 4 gradients
    assert all(call.where.startswith("test_profiler.py:") for call in reduced.values())
