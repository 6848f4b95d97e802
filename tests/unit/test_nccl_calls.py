"""The calls that NCCL gets, their order and their streams, seen by a recording stand-in."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ReduceOp

import hpcdist
from hpcdist.backends.loopback import LoopbackBackend
from hpcdist.backends.nccl import calls
from hpcdist.backends.nccl.backend import NCCLBackend
from hpcdist.core.call import Call
from hpcdist.core.errors import DistBackendError
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.table import ROWS
from tests.fakes import fake_nccl as fake

OLD, NEW = (2, 27, 3), (2, 30, 0)
SUM = ReduceOp.RedOpType.SUM
F32 = "torch.float32"


def made(rank: int = 1, size: int = 4, version: tuple[int, ...] = NEW) -> NCCLBackend:
    """Return a connected backend; ids come from a store where every rank has left its own."""
    store = HashStore()
    for key in (f"id/{root}" for root in range(size)):
        store.set(key, bytes(128).hex())
    for low, high in itertools.combinations(range(size), 2):
        store.set(f"pair/{low}-{high}", bytes(128).hex())
    backend = NCCLBackend(rank, size, fake.library(version), store, fake.FakeCuda())
    fake.take_journal()
    return backend


def connected(**kwargs: Any) -> NCCLBackend:
    backend = made(**kwargs)
    backend._connect(torch.device("cpu"))
    fake.take_journal()
    return backend


def begun(backend: NCCLBackend) -> Any:
    """Begin a call that the device has not ended."""
    tensor = ones(2)
    work = backend.start(Call(ROWS["all_reduce"], tensor, tensor, SUM))
    work.pending.end.is_complete = False
    return work


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def t(*shape: int, dtype: str = F32) -> tuple[tuple[int, ...], str]:
    return shape, dtype


# row, send, recv, root, counts -> the calls, of rank 1 of 4
ORDERS: dict[str, tuple[Any, ...]] = {
    "broadcast": (3, "in place", 2, None, [("broadcast", t(3), t(3), 2, "current")]),
    "all_reduce": (3, "in place", None, None, [("allreduce", t(3), t(3), "SUM", "current")]),
    "reduce": (3, None, 2, None, [("reduce", t(3), t(3), "SUM", 2, "current")]),
    "all_gather_single": (3, 12, None, None, [("allgather", t(3), t(12), "current")]),
    "all_gather": (
        2, 7, None, ([2], [3, 2, 0, 2]),
        [
            ("group", "start"),
            ("broadcast", t(3), t(3), 0, "current"),
            ("broadcast", t(2), t(2), 1, "current"),
            ("broadcast", t(2), t(2), 3, "current"),
            ("group", "end"),
        ],
    ),
    "gather": (3, None, 2, None, [("gather", t(3), t(3), 2, "current")]),
    "scatter": (None, 3, 2, None, [("scatter", t(3), t(3), 2, "current")]),
    "reduce_scatter_single": (12, 3, None, None, [("reduce_scatter", t(12), t(3), "SUM", "current")]),
    "reduce_scatter": (
        7, 2, None, ([3, 2, 0, 2], [2]),
        [
            ("group", "start"),
            ("reduce", t(3), t(3), "SUM", 0, "current"),
            ("reduce", t(2), t(2), "SUM", 1, "current"),
            ("reduce", t(2), t(2), "SUM", 3, "current"),
            ("group", "end"),
        ],
    ),
    "all_to_all_single": (
        12, 12, None, None,
        [
            ("group", "start"),
            *(each for peer in range(4) for each in (("send", t(3), peer, "current"), ("recv", t(3), peer, "current"))),
            ("group", "end"),
        ],
    ),
    "all_to_all": (
        6, 4, None, ([1, 2, 3, 0], [0, 2, 1, 1]),
        [
            ("group", "start"),
            ("send", t(1), 0, "current"),
            ("send", t(2), 1, "current"),
            ("recv", t(2), 1, "current"),
            ("send", t(3), 2, "current"),
            ("recv", t(1), 2, "current"),
            ("recv", t(1), 3, "current"),
            ("group", "end"),
        ],
    ),
}  # fmt: skip


def buffers(name: str) -> tuple[Any, Any, Any, Any, Any, list[Any]]:
    sent, received, root, counts, expected = ORDERS[name]
    send = None if sent is None else ones(sent)
    recv = send if received == "in place" else None if received is None else ones(received)
    return send, recv, SUM if ROWS[name].reduces else None, root, counts, expected


def test_every_row_with_buffers_has_its_order_here() -> None:
    assert set(ORDERS) == {name for name, row in ROWS.items() if row.buffers}


@pytest.mark.parametrize("name", ORDERS)
def test_a_call_is_made_on_the_current_stream_or_on_the_side_stream_between_two_events(name: str) -> None:
    backend = connected()
    send, recv, op, root, counts, expected = buffers(name)
    backend.run(Call(ROWS[name], send, recv, op, root, counts))
    assert fake.take_journal() == [*expected, ("current", "records")]
    finished: list[str] = []
    work = backend.start(
        Call(ROWS[name], send, recv, op, root, counts, lambda: finished.append(backend._cuda.current_stream().name), [])
    )
    on_side = [tuple("side" if part == "current" else part for part in call) for call in expected]
    forks = [("current", "records"), ("side", "waits for", "current")]
    assert fake.take_journal() == [*forks, *on_side, ("side", "records")]
    assert finished == ["side"]  # what copies staged results runs behind the call
    assert work.wait()
    assert fake.take_journal() == [("current", "waits for", "side")]  # and not the host


@pytest.mark.parametrize("name", ["gather", "scatter", "all_to_all_single"])
@pytest.mark.parametrize("rank", [1, 2])
def test_an_older_nccl_gets_sends_and_receives(name: str, rank: int) -> None:
    backend = connected(rank=rank, version=OLD)
    root = 2
    send, recv = {
        "gather": (ones(3), ones(12) if rank == root else None),
        "scatter": (ones(12) if rank == root else None, ones(3)),
        "all_to_all_single": (ones(12), ones(12)),
    }[name]
    backend.run(Call(ROWS[name], send, recv, None, None if name == "all_to_all_single" else root, None))
    everyone = range(4)
    expected = {
        ("gather", 1): [("send", t(3), 2, "current")],
        ("scatter", 1): [("recv", t(3), 2, "current")],
        ("gather", 2): [
            c
            for p in everyone
            for c in ([("send", t(3), 2, "current")] if p == 2 else []) + [("recv", t(3), p, "current")]
        ],
        ("scatter", 2): [
            c
            for p in everyone
            for c in [("send", t(3), p, "current")] + ([("recv", t(3), 2, "current")] if p == 2 else [])
        ],
    }.get((name, rank)) or [c for p in everyone for c in (("send", t(3), p, "current"), ("recv", t(3), p, "current"))]
    assert fake.take_journal() == [("group", "start"), *expected, ("group", "end"), ("current", "records")]


def test_which_release_has_which_call() -> None:
    assert calls.calls_of(fake.library(OLD))[ROWS["gather"]] is calls.gather
    assert calls.calls_of(fake.library(NEW))[ROWS["gather"]] is not calls.gather
    assert set(calls.calls_of(fake.library(NEW))) == {row for row in ROWS.values() if row.buffers}


def test_calls_on_no_elements_do_not_reach_nccl() -> None:
    backend = connected()
    for name in ("all_reduce", "reduce_scatter_single", "all_to_all_single", "broadcast"):
        empty = ones(0)
        backend.run(Call(ROWS[name], empty, empty, SUM if ROWS[name].reduces else None, 0, None))
    assert fake.take_journal() == []


def test_what_nccl_lacks_moves_as_bytes_and_complex_reduces_as_pairs() -> None:
    backend = connected()
    short = ones(3, dtype=torch.int16)
    backend.run(Call(ROWS["broadcast"], short, short, None, 0, None))
    backend.run(Call(ROWS["all_gather"], ones(1, dtype=torch.complex64), ones(5, dtype=torch.complex64), None, None,
                ([1], [2, 1, 1, 1])))  # fmt: skip
    numbers = ones(2, dtype=torch.complex64)
    backend.run(Call(ROWS["all_reduce"], numbers, numbers, SUM))
    byte = "torch.uint8"
    assert [call for call in fake.take_journal() if call[0] not in ("current", "group")] == [
        ("broadcast", t(6, dtype=byte), t(6, dtype=byte), 0, "current"),
        ("broadcast", t(16, dtype=byte), t(16, dtype=byte), 0, "current"),
        *[("broadcast", t(8, dtype=byte), t(8, dtype=byte), rank, "current") for rank in (1, 2, 3)],
        ("allreduce", t(4), t(4), "SUM", "current"),
    ]


def test_a_factor_is_made_once_with_its_bits_in_the_tensors_own_dtype() -> None:
    backend = connected()
    half = torch.distributed._make_nccl_premul_sum(0.375)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float8_e5m2, torch.float64):
        tensor = ones(2, dtype=dtype)
        backend.run(Call(ROWS["all_reduce"], tensor, tensor, half))
    factors = [call for call in fake.take_journal() if call[0] == "create_pre_mul_sum"]
    assert factors == [("create_pre_mul_sum", 0.375, name) for name in ("BFLOAT16", "FLOAT8E5M2", "FLOAT64")]


def test_factors_that_are_tensors_make_the_op_that_numbers_make() -> None:
    backend = connected()
    for factor in (torch.tensor([3.0]), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)):
        triple = torch.distributed._make_nccl_premul_sum(factor)
        values, number, scale = backend._reductions.prepare(ones(2), triple)
        assert values.tolist() == [3.0, 3.0]
        assert not values.requires_grad
        assert (number, scale) == (None, 1.0)
    with pytest.raises(RuntimeError, match="factor of PREMUL_SUM"):
        backend.check_reduction(
            ROWS["all_reduce"], torch.float32, torch.distributed._make_nccl_premul_sum(torch.tensor(1j))
        )


def test_an_exchange_in_place_goes_from_a_copy() -> None:
    backend = connected()
    tensor = ones(8)
    backend.run(Call(ROWS["all_to_all_single"], tensor, tensor, None))  # the fake refuses one buffer
    assert [each[0] for each in fake.take_journal()][:2] == ["group", "send"]


def test_a_group_call_launches_everything_at_its_end() -> None:
    backend = connected()
    finished: list[str] = []
    with backend.grouped():
        tensor = ones(3)
        first = backend.start(
            Call(ROWS["all_reduce"], tensor, tensor, SUM, None, None, lambda: finished.append("1"), [])
        )
        with backend.grouped():  # a call on lists inside a coalescing manager
            backend.isend(ones(2), 3, 0)
            second = backend.irecv(ones(2), 0, 0, None)
        assert fake.take_journal() == []
        assert finished == []
        with pytest.raises(DistBackendError, match="wait after it"):
            first.wait()
    assert fake.take_journal() == [
        ("current", "records"),
        ("side", "waits for", "current"),
        ("group", "start"),
        ("allreduce", t(3), t(3), "SUM", "side"),
        ("send", t(2), 3, "side"),
        ("recv", t(2), 0, "side"),
        ("group", "end"),
        ("side", "records"),
    ]
    assert finished == ["1"]
    assert second.wait()
    assert second.source_rank() == 0


def test_a_group_call_that_fails_before_its_end_launches_nothing() -> None:
    backend = connected()

    def fails() -> None:
        with backend.grouped():
            backend.isend(ones(2), 3, 0)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert fake.take_journal() == []
    backend.run(Call(ROWS["broadcast"], ones(1), ones(1), None, 0, None))
    assert fake.take_journal()[0][0] == "broadcast"


def test_messages_outside_a_group_call_have_a_communicator_of_two() -> None:
    backend = made(rank=1)
    backend.send(ones(2), 3, 0)
    assert backend.recv(ones(2), 0, 0) == 0
    backend.isend(ones(2), 3, 7)
    assert [call for call in fake.take_journal() if call[0] in ("init", "send", "recv")] == [
        ("init", 2, 0, 1),
        ("send", t(2), 1, "current"),
        ("init", 2, 1, 1),
        ("recv", t(2), 0, "current"),
        ("send", t(2), 1, "side"),
    ]


def test_messages_of_a_group_connected_at_once_go_over_its_own() -> None:
    backend = connected(rank=1)
    backend.communicators.is_eager = True
    backend.send(ones(2), 3, 0)
    assert fake.take_journal()[0] == ("send", t(2), 3, "current")


def test_messages_that_nccl_cannot_carry_are_errors() -> None:
    backend = connected()
    with pytest.raises(DistBackendError, match="batch_isend_irecv"):
        backend.isend(ones(1), 1, 0)
    with pytest.raises(DistBackendError, match="name the sender"):
        backend.recv(ones(1), None, 0)


def test_a_barrier_waits_on_the_host() -> None:
    backend = connected()
    backend._token = ones(1)
    backend.run(Call(ROWS["barrier"]))
    assert fake.take_journal()[-2:] == [("current", "waits for", "side"), ("host", "waits for", "current")]


def test_a_barrier_with_device_ids_is_the_gpus() -> None:
    backend = connected()
    backend._token = ones(1)
    backends = {"cpu": LoopbackBackend(), "cuda": backend}
    group = ProcessGroup((0, 1, 2, 3), 1, backends, "cpu:loopback,cuda:nccl", "both", "", timedelta(seconds=5))
    hpcdist.barrier(group)
    assert fake.take_journal() == []
    hpcdist.barrier(group, device_ids=[0])
    assert ("allreduce", t(1), t(1), "SUM", "side") in fake.take_journal()


def test_wait_with_a_limit_waits_on_the_host_and_says_when_it_is_over() -> None:
    backend = connected()
    work = begun(backend)
    assert not work.is_completed()
    with pytest.raises(DistBackendError, match="50ms"):
        work.wait(timedelta(milliseconds=50))
    assert backend.outstanding().pending is work.pending
    work.pending.end.is_complete = True
    assert work.wait(timedelta(milliseconds=50))
    assert backend.outstanding() is None
    assert work.is_success()


def test_inside_a_graphs_capture_no_event_is_asked_for() -> None:
    backend = connected()
    backend._cuda.is_capturing = True
    tensor = ones(2)
    backend.run(Call(ROWS["all_reduce"], tensor, tensor, SUM))
    assert [call[0] for call in fake.take_journal()] == ["allreduce"]  # and no event behind it, which could be queried
    work = backend.start(Call(ROWS["all_reduce"], tensor, tensor, SUM))
    assert not backend.communicators.group.streams.under_way
    work.wait()
    assert ("current", "records") in fake.take_journal()  # the fork, which capture follows


def test_the_future_of_a_work_is_there_at_once() -> None:
    backend = connected()
    work = begun(backend)
    assert work.get_future().wait() == work.result()
    work.pending.end.is_complete = True
    assert work.is_completed()  # and does not fulfil it a second time


def test_the_future_of_a_work_that_has_failed_has_an_error_of_cpps_own() -> None:
    backend = connected()
    work = begun(backend)
    backend.faults.interrupt("rank 3 is gone")
    with pytest.raises(RuntimeError, match="rank 3 is gone") as caught:
        work.get_future().value()
    assert caught.type is RuntimeError  # ``set_exception`` would leave the DistBackendError, on which DDP crashes


def test_a_stream_that_a_barrier_blocks_does_not_block_the_host() -> None:
    backend = connected()
    work = backend.start(Call(ROWS["barrier"]))
    work.pending.end.is_complete = False
    fake.take_journal()
    work.block_current_stream()
    assert fake.take_journal() == [("current", "waits for", "side")]


# the host, for the communicator's own calls
WAITS = [("host", "waits for", "side"), ("host", "waits for", "event on None")]


def test_a_subgroup_of_a_connected_group_is_a_split_and_of_another_connects_itself() -> None:
    limit = timedelta(seconds=1)
    backend = connected(rank=1)
    child = backend.split([[0, 2], [3, 1]], ["a", "b"], limit)
    assert (child.rank, child.size, child.communicators.is_eager) == (1, 2, True)
    assert backend.split([[0, 2]], ["c"], limit) is None
    assert fake.take_journal() == [
        *WAITS,
        ("split", 1, 1),
        *WAITS,
        ("split", None, 0),
    ]
    lazy = made(rank=1).split([[3, 1]], ["b"], limit)
    assert lazy.communicators.group is None
    assert fake.take_journal() == []


def test_shrink_leaves_ranks_out() -> None:
    backend = connected(rank=2)
    child = backend.shrink([1], "less")
    assert (child.rank, child.size) == (1, 3)
    assert fake.take_journal() == [*WAITS, ("shrink", [1], "DEFAULT")]
    backend.shrink([3], "failed", aborts=True)  # nobody waits for a rank that is gone
    assert fake.take_journal() == [("shrink", [3], "ABORT")]
    with pytest.raises(ValueError, match="rank 2"):
        backend.shrink([2], "me")
    with pytest.raises(DistBackendError, match=r"2\.27"):
        connected(version=(2, 26, 5)).shrink([3], "old")


def test_communicators_are_freed_in_one_order_on_all_ranks() -> None:
    backend = made(rank=2)
    for peer in (3, 0, 1):
        backend.send(ones(1), peer, 0)
    backend._connect(torch.device("cpu"))
    assert sorted(backend.communicators.pairs) == [0, 1, 3]
    order = backend.communicators.links()
    assert [link.comm.nranks for link in order] == [2, 2, 2, 4]
    assert order[:3] == [backend.communicators.pairs[0], backend.communicators.pairs[1], backend.communicators.pairs[3]]
    fake.take_journal()
    backend.close()
    backend.close()
    assert [call for call in fake.take_journal() if call[0] != "host"] == [
        step for size in (2, 2, 2, 4) for step in (("finalize", size), ("destroy", size))
    ]
    with pytest.raises(DistBackendError, match="destroyed"):
        backend.run(Call(ROWS["broadcast"], ones(1), ones(1), None, 0, None))


def test_an_error_on_the_device_is_told_and_ends_what_is_under_way() -> None:
    backend = connected()
    work = begun(backend)
    assert backend.faults.check_async() is None
    backend.communicators.group.comm.error = 7  # still in progress
    assert backend.faults.check_async() is None
    backend.communicators.group.comm.error = 6
    failure = backend.faults.check_async()
    assert "error 6" in str(failure)
    assert [each.pending for each in backend.pending()] == [work.pending]
    assert work._interrupt("rank 3 is gone")
    assert backend.pending() == []
    with pytest.raises(DistBackendError, match="rank 3 is gone"):
        work.wait()
    with pytest.raises(DistBackendError, match="rank 3 is gone"):
        backend.run(Call(ROWS["all_reduce"], ones(2), ones(2), SUM))
    fake.take_journal()
    backend.close()
    assert fake.take_journal() == []  # nothing left to free, nobody to wait for


def test_nccls_own_errors_become_c10ds() -> None:
    backend = connected()
    backend.communicators.group.comm.is_valid = False
    with pytest.raises(DistBackendError, match=r"all_reduce on rank 1 of 4 failed in NCCL 2\.30\.0"):
        backend.run(Call(ROWS["all_reduce"], ones(2), ones(2), SUM))
