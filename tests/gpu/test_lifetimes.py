"""Memory, communicators and contexts: what lives until when, on which device.

On a GPU a broken rule shows now and then; the emulated GPUs follow which task comes after which, and fail the test
whatever the timing was.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

import hpcdist as dist
from hpcdist.backends.nccl.streams import SWEEP_EVERY
from hpcdist.watch import calls_under_way

SLEEP_CYCLES = 100_000_000
COUNT = 30_000
WATCHDOG_SECONDS = 2.5  # it looks at least once a second


def overwrite(device):
    """Ask torch's allocator for memory that was given back, and write to it."""
    return [torch.full((COUNT,), -7.0, device=device) for _ in range(12)]


def in_place_exchange(rank, size, device):
    tensor = torch.full((size * COUNT,), float(rank), device=device)
    work = dist.all_to_all_single(tensor, tensor, async_op=True)
    return work, tensor.view(size, COUNT), [float(each) for each in range(size)]


def tensor_factor(rank, size, device):
    factor = torch.distributed._make_nccl_premul_sum(torch.tensor([0.5], device=device))
    tensor = torch.full((COUNT,), 2.0 * (rank + 1), device=device)
    return dist.all_reduce(tensor, factor, async_op=True), tensor.view(1, -1), [float(sum(range(size + 1)))]


def strided(rank, size, device):
    tensor = torch.full((COUNT // 100, 200), float(rank), device=device)[:, ::2]
    return dist.all_reduce(tensor, async_op=True), tensor, [float(sum(range(size)))] * (COUNT // 100)


def strided_input(rank, size, device):
    flat = torch.empty(size * COUNT, device=device)
    work = dist.all_gather_into_tensor(flat, torch.full((2 * COUNT,), float(rank), device=device)[::2], async_op=True)
    return work, flat.view(size, COUNT), [float(each) for each in range(size)]


def dropped_input(rank, size, device):
    flat = torch.empty(size * COUNT, device=device)
    work = dist.all_gather_into_tensor(flat, torch.full((COUNT,), float(rank), device=device), async_op=True)
    return work, flat.view(size, COUNT), [float(each) for each in range(size)]


def list_of_outputs(rank, size, device):
    outputs = [torch.empty(COUNT, device=device) for _ in range(size)]
    work = dist.all_gather(outputs, torch.full((COUNT,), float(rank), device=device), async_op=True)
    return work, outputs, [float(each) for each in range(size)]


def list_of_inputs(rank, size, device):
    share = torch.empty(COUNT, device=device)
    inputs = [torch.full((COUNT,), float(each + rank), device=device) for each in range(size)]
    work = dist.reduce_scatter(share, inputs, async_op=True)
    return work, share.view(1, -1), [float(sum(rank + each for each in range(size)))]


def bytes_of_integers(rank, size, device):
    tensor = torch.full((COUNT,), rank + 5, dtype=torch.int16, device=device)
    return dist.broadcast(tensor, size - 1, async_op=True), tensor.view(1, -1), [size + 4]


def ring(rank, size, device):
    received = torch.empty(2 * COUNT, device=device)[::2]
    operations = [
        dist.P2POp(dist.isend, torch.full((2 * COUNT,), float(rank), device=device)[::2], (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    works = dist.batch_isend_irecv(operations)
    return works[-1], received.view(1, -1), [float((rank - 1) % size)]


CASES = [in_place_exchange, tensor_factor, strided, strided_input, dropped_input, list_of_outputs, list_of_inputs]
CASES += [bytes_of_integers, ring]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_a_call_reads_and_writes_is_not_handed_out_meanwhile(case, rank, size, device):
    for _ in range(3):
        torch.cuda._sleep(SLEEP_CYCLES)  # the call is not begun when the host goes on
        work, rows, expected = case(rank, size, device)
        others = overwrite(device)
        work.wait()
        for row, value in zip(rows, expected, strict=True):
            assert bool((row == value).all())
        assert all(bool((each == -7.0).all()) for each in others)


def test_the_same_of_calls_that_are_launched_together(rank, size, device):
    for _ in range(3):
        tensors = [torch.full((size * COUNT,), float(rank), device=device) for _ in range(2)]
        torch.cuda._sleep(SLEEP_CYCLES)
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_to_all_single(tensor, tensor)
        others = overwrite(device)
        manager.wait()
        for tensor in tensors:
            assert tensor.view(size, COUNT)[:, 0].tolist() == [float(each) for each in range(size)]
        assert all(bool((each == -7.0).all()) for each in others)


@pytest.mark.parametrize("case", [in_place_exchange, tensor_factor, strided_input], ids=lambda case: case.__name__)
def test_a_wait_on_another_stream_frees_nothing_for_the_first(case, rank, size, device):
    other = torch.cuda.Stream()
    torch.cuda._sleep(SLEEP_CYCLES)
    work, rows, expected = case(rank, size, device)
    with torch.cuda.stream(other):
        work.wait()
    del work
    others = overwrite(device)
    other.synchronize()
    for row, value in zip(rows, expected, strict=True):
        assert bool((row == value).all())
    assert all(bool((each == -7.0).all()) for each in others)


def test_a_dropped_work_holds_its_memory_and_lets_go_of_it(gate, rank, size, device):
    streams = dist.group.WORLD.backend("cuda").communicators.group.streams
    dist.group.WORLD.backend("cuda").outstanding()
    before = torch.cuda.memory_allocated()
    gate.close()
    for _ in range(3):
        dist.all_reduce(torch.ones(COUNT, device=device), async_op=True)
    assert torch.cuda.memory_allocated() - before >= 3 * 4 * COUNT
    assert len(streams.under_way) >= 3
    gate.open()
    torch.cuda.synchronize()
    dist.group.WORLD.backend("cuda").outstanding()
    assert torch.cuda.memory_allocated() <= before
    assert not streams.under_way


@pytest.mark.parametrize("is_waited_for", [False, True])
@pytest.mark.parametrize("backend", ["nccl", "cuda:torch"])
def test_large_tensors_of_dropped_works_do_not_pile_up(backend, is_waited_for, connect, gate, device):
    group = connect(backend=backend)
    group.backend("cuda").outstanding()
    before, nbytes = torch.cuda.memory_allocated(), 1 << 22
    for _ in range(4):
        gate.close()
        work = dist.all_reduce(torch.ones(nbytes // 4, device=device), group=group, async_op=True)
        if is_waited_for:
            work.wait()  # all that uses the memory from now on is behind the call
            del work
            assert torch.cuda.memory_allocated() <= before
        else:
            del work
            assert torch.cuda.memory_allocated() <= before + nbytes
        gate.open()
        torch.cuda.synchronize()


def test_no_event_of_the_profiler_ends_after_the_profiler_which_crashes_torch(world, rank, size, device):
    tensors = [torch.ones(3, device=device) for _ in range(2)]
    with torch.profiler.profile() as profile:
        torch.cuda._sleep(SLEEP_CYCLES)
        works = [dist.all_reduce(tensors[0], async_op=True), world.allreduce_coalesced(tensors)]
        dist.all_reduce(tensors[0], async_op=True)
    names = [event.name for event in profile.events()]
    assert sum(name.endswith(":all_reduce") for name in names) == 3
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    assert all(work.is_completed() for work in works)


def test_a_dropped_work_that_hangs_is_told_of_and_aborted(two_ranks, connect, rank, device):
    group = connect()
    backend = group.backend("cuda")
    if rank == 0:
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor, group=group, async_op=True)
        hung = backend.outstanding()
        assert hung is backend.outstanding()
        assert backend.pending() == [hung]
        assert hung._call[0] is group.journal
    backend.faults.interrupt("a test says so")
    if rank == 0:
        assert isinstance(hung.exception(), dist.DistBackendError)
    torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("is_capturing", [False, True])
def test_an_abort_frees_memory_behind_what_is_queued(is_capturing, connect, device):
    group = connect()
    stream, graph, tensor = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.ones(COUNT, device=device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(torch.ones((COUNT, 2), device=device)[:, 0], group=group, async_op=True)
    if is_capturing:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            tensor.add_(1)
            group.backend("cuda").faults.interrupt("a test says so")
        graph.replay()
    else:
        group.backend("cuda").faults.interrupt("a test says so")
    overwrite(device)
    torch.cuda.synchronize()
    assert tensor[0].item() == 1 + is_capturing
    dist.barrier()


def test_events_come_from_a_pool(rank, size, device):
    streams = dist.group.WORLD.backend("cuda").communicators.group.streams
    made = []
    kept, streams.cuda = streams.cuda, Counting(streams.cuda, made)
    try:
        for _ in range(100):
            dist.all_reduce(torch.ones(1, device=device), async_op=True).wait()
            torch.cuda.synchronize()
    finally:
        streams.cuda = kept
    assert len(made) <= 2 * SWEEP_EVERY


class Counting:
    """``torch.cuda``, whose new events are counted."""

    def __init__(self, cuda, made):
        self._cuda, self._made = cuda, made

    def __getattr__(self, name):
        if name == "Event":
            self._made.append(name)
        return getattr(self._cuda, name)


def test_a_work_whose_event_another_call_has_taken_over_still_waits_for_nothing(rank, size, device):
    first = dist.all_reduce(torch.ones(1, device=device), async_op=True)
    torch.cuda.synchronize()
    assert first.is_completed()
    torch.cuda._sleep(SLEEP_CYCLES)
    second = dist.all_reduce(torch.ones(1, device=device), async_op=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert first.wait()
    assert stream.query()
    second.wait()


@pytest.mark.parametrize("way", ["group", "pairs"])
def test_a_peer_that_comes_late_to_the_end_is_waited_for(two_ranks, way, rank, device):
    group = dist.new_group()
    if way == "group":
        dist.all_reduce(torch.ones(1, device=device), group=group)
    elif rank < 2:
        tensor = torch.ones(3, device=device)
        dist.send(tensor, 1, group=group) if rank == 0 else dist.recv(tensor, 0, group=group)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(WATCHDOG_SECONDS)  # the watchdog of rank 0 looks while ncclCommDestroy waits there
    dist.destroy_process_group(group)


def test_an_end_past_the_timeout_raises_c10ds_error(two_ranks, rank, device):
    group = dist.new_group(timeout=timedelta(seconds=3))
    dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.cuda.synchronize()
    if rank == 1:
        dist.barrier()  # until the watchdogs of the others have ended their calls
        group.backend("cuda").faults.interrupt("it never came")
        dist.destroy_process_group(group)
    else:
        seen, has_ended = [], threading.Event()

        def look():
            while not has_ended.wait(0.05):
                seen.append([each.call.name for each in calls_under_way.under_way() if each.group is group])

        dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True)
        observer = threading.Thread(target=look)
        observer.start()
        with pytest.raises(dist.DistBackendError, match="has not entered all_reduce"):
            dist.destroy_process_group(group)
        has_ended.set()
        observer.join()
        assert ["all_reduce"] in seen
        assert all("destroy_process_group" not in names for names in seen if "all_reduce" in names), seen
        dist.barrier()


def active_contexts():
    """Return the devices on which this process has a context, as the driver says."""
    from cuda.bindings import driver

    return [each for each in range(torch.cuda.device_count()) if driver.cuDevicePrimaryCtxGetState(each)[2]]


def test_each_rank_has_a_context_on_its_own_gpu_only(two_ranks, rank, device):
    group = dist.new_group()
    tensor = torch.full((3,), float(rank), device=device)
    if rank == 0:
        dist.isend(tensor, 1, group=group).wait()
    elif rank == 1:
        dist.irecv(tensor, 0, group=group).wait()
    time.sleep(WATCHDOG_SECONDS)  # there are pairs' communicators only, and the watchdog asks for their calls
    assert group.backend("cuda").pending() == []
    assert active_contexts() == [device.index]
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["nccl", "mpi", "cuda:torch"])
def test_a_thread_that_has_chosen_no_device_starts_no_context(backend, rank, size, device):
    group = dist.new_group(backend=backend)
    tensors = [torch.ones(3, device=device) for _ in range(3)] + [torch.ones((3, 2), device=device)[:, 0]]
    begun, subgroups = dist.all_reduce(tensors[0], group=group, async_op=True), []
    torch.cuda.synchronize()
    for use in (
        begun.get_future,
        begun.wait,
        lambda: dist.all_reduce(tensors[1], group=group),
        lambda: dist.all_reduce(tensors[2], group=group, async_op=True).wait(),
        lambda: dist.all_reduce(tensors[3], group=group, async_op=True).wait(),
        lambda: subgroups.append(dist.split_group(group, [list(range(size))])),
        lambda: dist.destroy_process_group(subgroups.pop()),
        lambda: dist.destroy_process_group(group),
    ):
        with ThreadPoolExecutor(1) as pool:  # a thread of its own: torch leaves one where it has been put once
            pool.submit(use).result()
        assert active_contexts() == [device.index]
    assert [each.tolist() for each in tensors] == [[size] * 3] * 4


@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_a_strided_receive_may_be_waited_for_on_another_stream(two_ranks, backend, rank, device):
    group = dist.new_group(backend=backend)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        tensor = torch.full((COUNT, 2), float(rank), device=device)[:, 0]
        if rank < 2:
            work = (dist.irecv if rank else dist.isend)(tensor, 1 - rank, group=group)
    with torch.cuda.stream(second):
        if rank < 2:
            work.wait()
            del work  # and what the message was received into
        with torch.cuda.stream(first):
            overwrite(device)
        assert rank != 1 or bool((tensor.cpu() == 0).all())
    torch.cuda.synchronize()
    dist.destroy_process_group(group)


def test_a_work_inside_a_capture_has_not_ended(rank, size, device):
    before = dist.all_reduce(torch.ones(1, device=device), async_op=True)
    before.wait()
    tensor = torch.ones(16, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        assert before.is_completed()
        assert dist.group.WORLD.backend("cuda").pending() == []
        work.wait()
    assert work.exception() is None
    graph.replay()
    torch.cuda.synchronize()
    assert tensor.tolist() == [size] * 16


@pytest.mark.parametrize("backend", ["cpu:mpi,cuda:nccl", "cpu:mpi,cuda:torch"])
def test_a_graph_that_outlives_its_group(backend, rank, size, device):
    """NCCL's end of a communicator waits until no graph holds its calls: since 2.26, and without a limit."""
    group, tensor = dist.new_group(backend=backend), torch.ones(4, device=device)
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    tensor.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert tensor.tolist() == [size] * 4
    dist.barrier()


def test_a_call_of_a_group_that_was_interrupted_does_not_reach_nccl(connect, device):
    group = connect()
    backend = group.backend("cuda")
    assert backend.faults.interrupt("a test says so")
    assert backend.faults.interrupt("a second time, when there is nothing left to abort")
    assert backend.faults.check_async() is None
    for call in (
        lambda: dist.all_reduce(torch.ones(1, device=device), group=group),
        lambda: dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True),
        lambda: dist.all_reduce(
            torch.ones(1, device=device), torch.distributed._make_nccl_premul_sum(0.3), group=group
        ),
        lambda: backend.split([[0]], ["one"], timedelta(seconds=5)),
    ):
        with pytest.raises(dist.DistBackendError, match="a test says so"):
            call()
    dist.barrier()
