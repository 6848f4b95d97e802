"""One-sided windows: what is put, got, accumulated and signalled, on one node and between imitated ones."""

import gc
import math
import os
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

import hpcdist as dist
from hpcdist.backends.mpi.reductions import COMPARES_AS_SIGNED, VENDOR, VERSION
from hpcdist.core import memory_file
from hpcdist.core.errors import CallsDifferError
from tests.mpi.conftest import BACKEND
from tests.ranks import of_all_ranks

from .refused import freed

pytestmark = pytest.mark.filterwarnings("error:a Window is closed")
HAS_MPI = BACKEND in (None, "mpi") or "cpu:mpi" in BACKEND
OPS = {
    ReduceOp.SUM: lambda a: a.sum(0),
    ReduceOp.PRODUCT: lambda a: a.prod(0),
    ReduceOp.MIN: lambda a: a.amin(0),
    ReduceOp.MAX: lambda a: a.amax(0),
}
# what Open MPI takes for numbers of another kind before a version, in windows that are not one node's shared memory
ALL_VERSIONS = (math.inf,)
MISTAKEN = {
    (ReduceOp.MIN, torch.uint32): ALL_VERSIONS,
    (ReduceOp.MIN, torch.uint64): ALL_VERSIONS,
    ("fetch_and_add", torch.complex64): (5,),
}


@pytest.fixture(autouse=True)
def _windows(request):
    if HAS_MPI is (request.function is test_a_backend_without_windows):
        pytest.skip("windows need MPI")


def test_a_backend_without_windows(world):
    with pytest.raises(RuntimeError, match="does not support new_window: one-sided windows need MPI"):
        dist.Window(1)
    dist.barrier()


@pytest.fixture(params=["one node", "two nodes", "own tensors"])
def opened(request, size):
    """Makes windows in each of the ways that there are."""
    if request.param == "two nodes":
        request.getfixturevalue("two_nodes")
    nodes = of_all_ranks(os.environ.get("HPCDIST_NODE_KEY", os.uname().nodename))

    def make(numel, dtype=torch.float32, group=None):
        given = torch.zeros(numel, dtype=dtype) if request.param == "own tensors" else numel
        return dist.Window(given, dtype, group)

    make.is_shared = request.param != "own tensors" and len({*nodes}) == 1
    return make


def refusal(opened, op, dtype):
    """Return what expects the error of a call that this MPI would make wrongly; it gives None for others."""
    if VENDOR == "Open MPI" and not opened.is_shared and MISTAKEN.get((op, dtype), ()) > VERSION:
        return pytest.raises((TypeError, ValueError), match=rf"Open MPI .*takes {dtype} for .*integers")
    return nullcontext()


def neighbours(rank, size):
    return (rank + 1) % size, (rank - 1) % size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_put_and_signal(opened, rank, size, dtype):
    after, before = neighbours(rank, size)
    with opened(10, dtype) as window:
        assert not window.tensor.any()
        dist.barrier()
        for number in range(20):
            values = (torch.arange(4) + number + rank).to(dtype)
            window.put(values, after, 3)
            window.signal(after)
            window.wait_signal(before)
            want = torch.zeros(10, dtype=dtype)
            want[3:7] = (torch.arange(4) + number + before).to(dtype)
            assert torch.equal(window.tensor, want)
            window.signal(before)  # it may be overwritten
            window.wait_signal(after)


def test_put_from_any_layout(opened, rank, size):
    after, _ = neighbours(rank, size)
    with opened(6) as window:
        for values in (
            torch.arange(6.0).view(2, 3).t(),
            torch.arange(6.0, requires_grad=True),
            np.arange(6, dtype=np.float32),
            torch.ones(1).expand(6),
            torch.zeros(0),
        ):
            window.put(values, after)
            dist.barrier()
            flat = torch.as_tensor(values).detach().reshape(-1)
            assert torch.equal(window.tensor[: flat.numel()], flat)
            dist.barrier()


def test_get(opened, rank, size):
    with opened(6 + rank, torch.int32) as window:  # ranks may differ in size
        assert window.sizes == [6 + each for each in range(size)]
        window.tensor.copy_(torch.arange(6 + rank) + 100 * rank)
        dist.barrier()
        for other in range(size):
            got = torch.zeros(5 + other, dtype=torch.int32)
            window.get(got, other, 1)
            assert got.tolist() == [1 + 100 * other + each for each in range(5 + other)]
            strided = torch.zeros(3, 2, dtype=torch.int32)
            window.get(strided[:, 1], other, 2)
            assert strided.tolist() == [[0, 100 * other + each] for each in (2, 3, 4)]
            array = np.zeros(1, np.int32)
            window.get(array, other)
            assert array[0] == 100 * other
        dist.barrier()


@pytest.mark.skipif(not COMPARES_AS_SIGNED, reason="this MPI orders unsigned integers")
def test_the_order_of_unsigned_integers_that_this_mpi_does_not_know(opened, rank, size):
    with opened(2, torch.uint8) as window, pytest.raises(ValueError, match=r"before 5\.0 takes torch\.uint8"):
        window.accumulate(torch.ones(2, dtype=torch.uint8), 0, 0, ReduceOp.MAX)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool], ids=str)
def test_accumulate(opened, rank, size, dtype):
    with opened(5, dtype) as window:
        for op, combine in OPS.items():
            window.tensor.fill_(2)
            dist.barrier()
            window.accumulate(torch.full((3,), rank + 1, dtype=dtype), 0, 1, op)
            dist.barrier()
            if rank == 0:
                every = torch.tensor([2, *range(1, size + 1)]).to(dtype)
                was = torch.tensor(2).to(dtype).item()
                assert window.tensor.tolist() == [was, *[combine(every).to(dtype).item()] * 3, was]
            dist.barrier()


@pytest.mark.parametrize(
    ("op", "own", "other", "want"),
    [(ReduceOp.BAND, 6, 3, 2), (ReduceOp.BOR, 6, 3, 7), (ReduceOp.BXOR, 6, 3, 5), (ReduceOp.MIN, 2, -3, 2)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("dtype", [torch.uint32, torch.int64, torch.uint64], ids=str)
def test_accumulate_what_open_mpi_takes_for_other_integers(opened, rank, size, dtype, op, own, other, want):
    """osc/rdma of 5.0.11 combines an int64 with itself by bitwise ops, and takes unsigned integers for signed ones."""
    if op == ReduceOp.MIN and (COMPARES_AS_SIGNED or dtype is torch.int64):
        pytest.skip("for unsigned integers, where MPI orders them")
    with opened(3, dtype) as window:
        window.tensor.copy_(torch.tensor([own] * 3))
        dist.barrier()
        with refusal(opened, op, dtype) as error:
            window.accumulate(torch.tensor([other] * 2).to(dtype), (rank + 1) % size, 1, op)
        dist.barrier()
        assert window.tensor.tolist() == [own, *[own if error else want] * 2]
        dist.barrier()


def test_accumulate_of_complex_numbers(opened, rank, size):
    with opened(2, torch.complex64) as window:
        window.tensor.fill_(1 + 2j)
        dist.barrier()
        window.accumulate(torch.full((1,), 3 - 4j), (rank + 1) % size, 1)
        dist.barrier()
        assert window.tensor.tolist() == [1 + 2j, 4 - 2j]
        dist.barrier()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_a_queue_without_a_server(opened, rank, size, dtype):
    with opened(1, dtype) as window:
        mine = []
        while (task := window.fetch_and_add(0)) < 100:
            mine.append(task)
        everyone = of_all_ranks(mine)
        assert sorted(task for tasks in everyone for task in tasks) == list(range(100))  # each taken once
        assert window.fetch_and_add(rank, 0, 0) == (100 + size if rank == 0 else 0)
        dist.barrier()


@pytest.mark.parametrize("odd", [0, 1], ids=["on the first rank", "on the second"])
def test_windows_of_few_elements_with_other_strides(odd, rank, size):
    """Torch gives an empty array the stride 0; a single element may have any. The others waited for such a rank."""
    memories = [np.ones(0), torch.ones(4, dtype=torch.float64)[::4]]
    with dist.Window(memories[(rank + odd) % 2]) as window:
        assert window.sizes == [(each + odd) % 2 for each in range(size)]
        dist.barrier()
        for other in range(size):
            window.accumulate(torch.ones(2 * window.sizes[other], dtype=torch.float64)[::2], other)
        dist.barrier()
        assert window.tensor.tolist() == [1.0 + size] * window.sizes[rank]
    with dist.Window(1, torch.complex64) as window:
        window.accumulate(torch.full((2,), 1 + 2j)[::2], 0)
        dist.barrier()
        assert window.tensor[0] == (0 if rank else size * (1 + 2j))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint64, torch.float32, torch.complex64], ids=str)
def test_fetch_and_add_of_any_dtype(opened, rank, size, dtype):
    with opened(2, dtype) as window:
        with refusal(opened, "fetch_and_add", dtype) as error:
            for before in (0, 1):
                assert window.fetch_and_add((rank + 1) % size, 1) == before
        dist.barrier()
        assert window.tensor.tolist() == [0, 0 if error else 1 if dtype is torch.bool else 2]
        dist.barrier()


def test_signals_are_counted_by_sender(opened, rank, size):
    with opened(1) as window:
        for other in range(size):
            for _ in range(3):
                window.signal(other)
        for _ in range(3):
            for other in reversed(range(size)):
                window.wait_signal(other)
        with pytest.raises(dist.DistBackendError, match=rf"no signal of rank {rank} has come in 0\.1 s"):
            window.wait_signal(rank, timedelta(seconds=0.1))
        window.signal(rank)
        window.wait_signal(rank)  # a wait that was given up takes none
        dist.barrier()


def test_a_signal_to_another_node_is_atomic(two_nodes, rank, size):
    """Its receiver polls what MPI_Put may write in parts."""
    made = []

    class Seen:
        def __getattr__(self, name):
            made.append(name)
            return getattr(between, name)

    with dist.Window(1) as window:
        after, before = neighbours(rank, size)
        is_far = after not in window._remote._signals
        between, window._remote._group = window._remote._group, Seen()
        window.signal(after)
        window.wait_signal(before)
        window._remote._group = between
        assert is_far or after % 2 == rank % 2
        assert made == (["Accumulate", "Flush"] if is_far else [])
        dist.barrier()


def test_memory_of_neighbours(rank, size):
    with dist.Window(3) as window:
        after, before = neighbours(rank, size)
        there = window.map_remote_tensor(after)
        there[1] = rank
        window.signal(after)
        window.wait_signal(before)
        assert window.tensor.tolist() == [0, before, 0]
        assert window.map_remote_tensor(rank).data_ptr() == window.tensor.data_ptr()
        del there
        dist.barrier()


def test_memory_that_cannot_be_mapped(rank, size, monkeypatch):
    with dist.Window(torch.zeros(3)) as window:
        assert window.map_remote_tensor(rank).tolist() == [0] * 3
        if size > 1:
            with pytest.raises(RuntimeError, match=f"cannot load from the memory of rank {(rank + 1) % size}"):
                window.map_remote_tensor((rank + 1) % size)
    monkeypatch.setenv("HPCDIST_NODE_KEY", f"node{rank}")
    with dist.Window(3) as window:
        if size > 1:
            with pytest.raises(RuntimeError, match="on another node"):
                window.map_remote_tensor((rank + 1) % size)


def test_a_tensor_is_written_in_place(rank, size):
    after, before = neighbours(rank, size)
    mine = torch.zeros(2, 2)
    with dist.Window(mine) as window:
        window.put(torch.full((1,), float(rank)), after, 3)
        dist.barrier()
        assert mine.tolist() == [[0, 0], [0, before]]
        with pytest.raises(RuntimeError, match="not resizable"):  # others would write to the freed memory
            mine.untyped_storage().resize_(0)
    assert mine[1, 1] == before


def test_a_rank_that_computes_on_the_same_node_need_not_enter_mpi(rank, size, tmp_path):
    if VENDOR == "MPICH" and VERSION < (5,):
        pytest.skip("MPICH 4.0.2 waits for the target of an atomic call (docs/reference/known-issues.md)")
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    done = Path(folder[0], "done")
    with dist.Window(4, torch.int64) as window:
        dist.barrier()
        if rank == 0:
            window.put(torch.ones(4, dtype=torch.int64), size - 1)
            before = window.fetch_and_add(size - 1, 0)
            done.touch()
        deadline = time.monotonic() + 10
        while not (is_done := done.exists()) and time.monotonic() < deadline:  # outside of MPI
            time.sleep(0.001)
        dist.barrier()
        assert rank or before == 1
    assert is_done  # after the window has ended, so that no rank waits for one that has failed


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int16])
def test_narrow_sums_wrap(rank, size, dtype):
    """Open MPI's op/avx saturates them."""
    most, count = torch.iinfo(dtype).max, 100
    with dist.Window(count, dtype) as window:
        for part in (slice(0, 1), slice(1, 38), slice(38, count)):
            window.accumulate(torch.full((count,), most - 3, dtype=dtype)[part], size - 1, part.start)
        dist.barrier()
        if rank == size - 1:
            expected = torch.full((count,), size * (most - 3)).to(dtype)
            assert window.tensor.tolist() == expected.tolist()
        dist.barrier()


def test_a_rank_that_waits_outside_mpi_is_reached(two_ranks, rank, size):
    others = dist.new_group(backend="gloo")  # whose barrier makes no call of MPI
    with dist.Window(torch.zeros(300_000), torch.float32) as window:
        if rank == 0:
            window.put(torch.ones(300_000), size - 1)
            window.accumulate(torch.ones(4), size - 1, 0, ReduceOp.SUM)
        dist.barrier(others)
        if rank == size - 1:
            assert window.tensor[:5].tolist() == [2, 2, 2, 2, 1]
        dist.barrier()
    dist.destroy_process_group(others)


WRONG = [
    (lambda w, n: w.put(torch.zeros(3), n), ValueError, "there is no rank"),
    (lambda w, n: w.put(torch.zeros(3), -1), ValueError, r"no rank -1 in the group \(0 to"),
    (lambda w, n: w.put(torch.zeros(3), 0, 6), ValueError, "3 elements from offset 6 on do not lie in the 8 elem"),
    (lambda w, n: w.put(torch.zeros(3), 0, -1), ValueError, "3 elements from offset -1"),
    (lambda w, n: w.put(torch.zeros(3).int(), 0), ValueError, "the tensor is torch.int32 on cpu; expected torch.fl"),
    (lambda w, n: w.put([1.0], 0), TypeError, "Expected parameter `tensor` of type torch.Tensor"),
    (lambda w, n: w.put(torch.zeros(3), "0"), TypeError, "a rank is '0'"),
    (lambda w, n: w.get(torch.zeros(9), 0), ValueError, "9 elements from offset 0"),
    (
        lambda w, n: w.accumulate(torch.zeros(1), 0, 0, ReduceOp.AVG),
        ValueError,
        "ReduceOp.AVG is not an op of one-sided",
    ),
    (lambda w, n: w.accumulate(torch.zeros(1), 0, 0, ReduceOp.BAND), RuntimeError, "BAND.*Window.accumulate of float"),
    (lambda w, n: w.fetch_and_add(0, 8), ValueError, "1 elements from offset 8"),
    (lambda w, n: w.put(freed(4), 0), ValueError, "storage was freed"),
    (lambda w, n: w.get(freed(4), 0), ValueError, "storage was freed"),
    (lambda w, n: w.accumulate(freed(4), 0), ValueError, "storage was freed"),
    (lambda w, n: w.put(freed(2, step=2), 0), ValueError, "storage was freed"),
    (lambda w, n: w.get(freed(2, step=2), 0), ValueError, "storage was freed"),
    (lambda w, n: w.put(torch.eye(2).to_sparse(), 0), TypeError, r"Window.put takes dense tensors"),
    (lambda w, n: w.get(torch.eye(2).to_sparse(), 0), TypeError, r"Window.get takes dense tensors"),
    (
        lambda w, n: w.put(torch.nested.nested_tensor([torch.ones(2)]), 0),
        TypeError,
        r"Window.put does not carry nested",
    ),
    (lambda w, n: w.put(torch.ones(2, device="meta"), 0), ValueError, "the tensor is torch.float32 on meta"),
    (lambda w, n: w.signal(n), ValueError, "there is no rank"),
    (lambda w, n: w.wait_signal(n), ValueError, "there is no rank"),
    (lambda w, n: w.wait_signal(0, 3.0), TypeError, "timeout"),
    (lambda w, n: w.wait_signal(0, timedelta(seconds=-1)), ValueError, "Invalid timeout: -1 s"),
    (lambda w, n: w.accumulate(torch.ones(1), 0, 0, "sum"), TypeError, "op is 'sum' of type str"),
    (lambda w, n: w.get(torch.ones(1), 0, 0.0), TypeError, "offset is 0.0 of type float"),
    (lambda w, n: w.fetch_and_add(0, 0, "1"), TypeError, "value is '1'"),
    (lambda w, n: w.fetch_and_add(0, 0, None), TypeError, "value is None"),
    (lambda w, n: w.fetch_and_add(0, 0, 1j), TypeError, "value is 1j"),
    (lambda w, n: w.fetch_and_add(0, 0, [1.0, 2.0]), TypeError, r"value is \[1.0, 2.0\]"),
    (lambda w, n: w.signal(None), TypeError, "a rank is None"),
    (lambda w, n: w.map_remote_tensor(n), ValueError, "there is no rank"),
]


def test_bad_arguments(rank, size):
    with dist.Window(8) as window:
        for call, error, text in WRONG:
            with pytest.raises(error, match=text):
                call(window, size)


def test_numbers_of_other_types(rank, size):
    with dist.Window(np.int64(3), torch.int64) as window:
        for value, text in ((1.5, "value is 1.5 of type float"), (1 << 70, "expected a number that torch.int64 has")):
            with pytest.raises(TypeError, match=text):
                window.fetch_and_add(0, 0, value)
        with pytest.raises(ValueError, match="its storage was freed"):
            window.fetch_and_add(0, 0, freed(4))
        dist.barrier()
        assert not window.tensor.any()
        dist.barrier()
        window.fetch_and_add(torch.tensor(0), np.int64(1), torch.tensor(2))
        dist.barrier()
        assert window.tensor.tolist() == [0, 2 * size * (rank == 0), 0]
        dist.barrier()
    with dist.Window(1, torch.float32) as window:
        assert window.fetch_and_add(rank, 0, 1.5) == 0.0
        assert window.fetch_and_add(rank, 0, np.float32(1)) == 1.5
        with pytest.raises(ValueError, match="its storage was freed"):
            window.fetch_and_add(0, 0, freed(4))
    for dtype in ("float32", torch.quint8):
        with pytest.raises(TypeError, match="`dtype` is"):
            dist.Window(1, dtype)


def test_dtypes_without_atomic_calls(rank):
    with dist.Window(2, torch.bfloat16) as window:
        with pytest.raises(TypeError, match=r"MPI has no atomic calls for torch.bfloat16"):
            window.accumulate(torch.ones(1, dtype=torch.bfloat16), 0)
        with pytest.raises(TypeError, match=r"MPI has no atomic calls for torch.bfloat16"):
            window.fetch_and_add(0)


def test_bad_memory_is_an_error_on_all_ranks(rank, size, monkeypatch):
    last = rank == size - 1
    with pytest.raises(ValueError, match=f"rank {size - 1} of the group: ValueError: `memory` is -1"):
        dist.Window(-1 if last else 1)
    with pytest.raises(TypeError, match="`dtype` is of type str"):
        dist.Window(1, "float")
    with pytest.raises(ValueError, match="is not a plain tensor; expected a contiguous one"):
        dist.Window(torch.zeros(2, 2).t())
    with pytest.raises(ValueError, match="storage was freed"):
        dist.Window(freed(4) if last else torch.ones(4))
    with pytest.raises(dist.DistBackendError, match=r"/dev/shm of host .* are needed"):
        dist.Window(1 << 50)
    if last:
        monkeypatch.setattr(memory_file, "free_bytes", lambda: 0)  # full: MPI would fail on one rank, and others wait
    for memory in 1, torch.zeros(1):  # a counter for each rank lies in shared memory too
        with pytest.raises(dist.DistBackendError, match=r"/dev/shm of host .* has 0 bytes free, and \d+ are needed"):
            dist.Window(memory)
    if size > 1:
        with pytest.raises(ValueError, match=r"rank 0 opens elements of torch.float32, rank"):
            dist.Window(torch.zeros(1) if last else 1)
        with pytest.raises(ValueError, match=r"rank 0 opens elements of torch.int32, rank"):
            dist.Window(1, torch.int64 if last else torch.int32)
    everyone = of_all_ranks(rank)
    assert everyone == list(range(size))


def test_groups(rank, size):
    halves = [dist.new_group([each for each in range(size) if each % 2 == part]) for part in range(min(2, size))]
    own = halves[rank % 2]
    with dist.Window(1, torch.int64, own) as window:
        window.fetch_and_add(0, 0, rank)
        dist.barrier(own)
        if dist.get_rank(own) == 0:
            assert window.tensor.item() == sum(each for each in range(size) if each % 2 == rank % 2)
        dist.barrier(own)


def test_after_its_end(rank):
    window = dist.Window(2)
    window.close()
    window.close()
    with pytest.raises(ValueError, match="the window is closed"):
        window.put(torch.zeros(1), 0)
    assert not hasattr(window, "tensor")


def test_a_rank_that_makes_another_call_in_place_of_the_end(opened, rank, size, monkeypatch):
    group = dist.new_group()
    with monkeypatch.context() as one_node:  # on which no rank is left in a call; between nodes one may be
        one_node.delenv("HPCDIST_NODE_KEY", raising=False)
        dist.barrier(group)
    window = opened(2, group=group)
    if size > 1:
        with pytest.raises(CallsDifferError, match=r"Window\.close.*barrier|barrier.*Window\.close"):
            dist.barrier(group) if rank == size - 1 else window.close()
    window.put(torch.ones(1), rank)
    window.close()  # no rank had closed it
    dist.destroy_process_group(group)


def test_ranks_that_close_two_windows_in_another_order(opened, rank, size):
    first, second = opened(2), opened(3, torch.int64)
    if size > 1:
        with pytest.raises(ValueError, match=r"close different windows.*rank 0 number \d+; ranks? 1.* number \d+"):
            (second if rank == 0 else first).close()
    for window in (first, second):
        assert window.tensor.numel() > 1
        window.close()


def test_memory_in_use_is_not_freed(rank, size):
    window = dist.Window(2)
    held = window.map_remote_tensor((rank + 1) % size)[1:]
    with pytest.warns(RuntimeWarning, match="closed while a rank has a tensor on its memory"):
        window.close()
    held.fill_(3)
    assert held.item() == 3
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = dist.Window(2)
        seen = other.tensor
        del seen
        gc.collect()
        other.close()


def test_the_end_of_the_group_closes_windows(opened, rank, size):
    window, other = opened(2), opened(1)
    window.put(torch.ones(1), (rank + 1) % size)
    del other.tensor, window.tensor
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="its group was destroyed"):
        window.signal(0)
    dist.init_process_group(BACKEND)
    with opened(2) as again:
        again.signal((rank + 1) % size)
        again.wait_signal((rank - 1) % size)
