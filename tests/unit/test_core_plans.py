"""Plans, buckets and messages to oneself: rules without processes."""

from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp

from hpcdist.backends.loopback import LoopbackBackend
from hpcdist.core import buckets
from hpcdist.core.call_cache import LOOKS
from hpcdist.core.errors import DistBackendError
from hpcdist.core.issue import check, issue
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.reduction import premul_sum
from hpcdist.core.self_messages import SelfMessages
from hpcdist.core.table import ALL_GATHER_SINGLE, ALL_REDUCE, BROADCAST


@pytest.fixture
def group():
    return ProcessGroup((0,), 0, {"cpu": LoopbackBackend()}, "loopback", "0", "", timedelta(seconds=10))


def test_buckets_follow_from_sizes_and_dtypes_only(group):
    def of(*lengths, layout=lambda tensor: tensor):
        return buckets.buckets(group, [layout(torch.zeros(length)) for length in lengths], ReduceOp.SUM, check)

    alone, whole = buckets.ALONE_BYTES // 4, buckets.BUCKET_BYTES // 4
    assert of(1, 2, 3) == [[0, 1, 2]]
    assert of(alone, 1) == [[0, 1]]  # together they fit into one bucket
    assert of(whole, 1) == [[0], [1]]
    assert of(1, whole, 2, alone) == [[1], [3], [0, 2]]
    assert of(*[alone - 1] * 5) == [[0, 1, 2, 3], [4]]
    assert of() == []
    for lengths in ((1, 2, 3), (whole, 1), (alone - 1, alone, 1, whole)):
        expected = of(*lengths)
        assert of(*lengths, layout=lambda tensor: torch.stack([tensor, tensor], 1)[:, 0]) == expected
        assert of(*lengths, layout=lambda tensor: tensor.requires_grad_()) == expected
    mixed = [torch.zeros(1), torch.zeros(1, dtype=torch.int32), torch.zeros(2), torch.eye(2).to_sparse()]
    assert buckets.buckets(group, mixed, ReduceOp.SUM, check) == [[3], [0, 2], [1]]
    halves = [torch.zeros(1, dtype=torch.complex64), torch.zeros(2)]
    assert buckets.buckets(group, halves, ReduceOp.SUM, check) == [[0, 1]]  # another rank may give two real ones
    assert buckets.buckets(group, halves, ReduceOp.PRODUCT, check) == [[0], [1]]


def test_repeated_asynchronous_calls_into_inference_tensors(group):
    with torch.inference_mode():
        outputs = [torch.zeros(4) for _ in range(3 * LOOKS)]
        works = [issue(ALL_GATHER_SINGLE, group, torch.full((4,), 2.0), each, async_op=True) for each in outputs]
    assert ALL_GATHER_SINGLE in group.known
    for work in works:
        work.wait()
    assert all(bool((each == 2).all()) for each in outputs)
    group.cpu.close()


def test_plans_are_made_once_and_know_the_window():
    pytest.importorskip("mpi4py.MPI", reason="no MPI library")
    from hpcdist.backends.mpi.node.thresholds import NEVER, Thresholds
    from hpcdist.backends.mpi.plans import Plans

    plans = Plans(4, Thresholds("64K"))
    made = plans.of(ALL_REDUCE, torch.float32, ReduceOp.SUM)
    assert made is plans.of(ALL_REDUCE, torch.float32, ReduceOp.SUM)
    assert made.shared_from == 65536
    assert made.reduction is not None
    assert made.reduction.is_direct
    assert not plans.of(ALL_REDUCE, torch.bfloat16, ReduceOp.SUM).reduction.is_direct
    assert plans.of(BROADCAST, torch.float32, None).reduction is None
    factor = torch.distributed._make_nccl_premul_sum(2.0)  # lives as long as its caller keeps it
    assert plans.of(ALL_REDUCE, torch.float32, factor) is plans.of(ALL_REDUCE, torch.float32, premul_sum(3.0))
    for op in (ReduceOp.PREMUL_SUM, premul_sum(torch.tensor(2j))):  # without one, and of other values
        with pytest.raises(ValueError, match="the factor of PREMUL_SUM is"):
            plans.of(ALL_REDUCE, torch.float32, op)
    assert plans.of(ALL_REDUCE, torch.float32, factor).shared_from == NEVER
    with pytest.raises(RuntimeError, match="BAND"):
        plans.of(ALL_REDUCE, torch.float32, ReduceOp.BAND)
    for nodes, ranks_per_node in ((1, 4), (2, 2)):
        plans.locate(nodes, ranks_per_node)
        assert plans.of(ALL_REDUCE, torch.float32, ReduceOp.SUM).shared_from == 65536
    plans.locate(2, 0)  # nodes with different numbers of ranks: MPI alone
    assert plans.of(ALL_REDUCE, torch.bfloat16, ReduceOp.SUM).shared_from == NEVER
    plans.locate(4, 1)  # nodes of one rank: what MPI would send in float32 only
    assert plans.of(ALL_REDUCE, torch.bfloat16, ReduceOp.SUM).shared_from == 65536
    assert plans.of(ALL_REDUCE, torch.float32, ReduceOp.SUM).shared_from == NEVER
    assert plans.of(BROADCAST, torch.bfloat16, None).shared_from == NEVER
    plans.give_up_window()
    assert plans.of(ALL_REDUCE, torch.float32, ReduceOp.SUM).shared_from == NEVER


def test_blocks_between_nodes_have_a_least_size():
    pytest.importorskip("mpi4py.MPI", reason="no MPI library")
    from hpcdist.backends.mpi.node.thresholds import LEAST_BLOCK, Thresholds
    from hpcdist.backends.mpi.plans import Plans

    plans = Plans(128, Thresholds())
    plans.locate(32, 4)
    assert plans.of(ALL_GATHER_SINGLE, torch.float32, None).shared_from == 128 * LEAST_BLOCK
    assert plans.of(ALL_REDUCE, torch.bfloat16, ReduceOp.SUM).shared_from == 128 * LEAST_BLOCK
    assert plans.of(ALL_REDUCE, torch.float32, ReduceOp.SUM).shared_from < 128 * LEAST_BLOCK


def test_before_the_nodes_are_known_the_least_threshold_of_all_holds():
    pytest.importorskip("mpi4py.MPI", reason="no MPI library")
    from hpcdist.backends.mpi.node.thresholds import BYTES, Thresholds

    known = Thresholds()
    for library in {library for library, _ in BYTES}:
        for name, op in (("all_reduce", "SUM"), ("broadcast", None), ("reduce_scatter_single", "SUM")):
            for dtype in (torch.float32, torch.bfloat16):
                least = known.of(name, dtype, op, 0, 0, 4, library)
                for nodes, ranks_per_node in ((1, 4), (2, 2), (4, 1), (3, 0)):
                    assert known.of(name, dtype, op, nodes, ranks_per_node, 4, library) >= least, (name, dtype, nodes)


def test_a_rank_alone_takes_what_many_ranks_take(group):
    with torch.inference_mode():
        inferred = torch.zeros(3)
    issue(ALL_GATHER_SINGLE, group, torch.ones(3), inferred)
    assert inferred.tolist() == [1] * 3
    whole = torch.arange(4.0)
    issue(ALL_GATHER_SINGLE, group, whole[:-1], whole[1:])
    assert whole.tolist() == [0, 0, 1, 2]
    narrow = torch.ones(3).to(torch.float8_e4m3fn)
    issue(ALL_REDUCE, group, narrow, narrow, torch.distributed._make_nccl_premul_sum(2.0))
    assert narrow.tolist() == [2] * 3
    messages = SelfMessages(0)
    messages.send(torch.full((3,), 4.0), 0)
    assert messages.receive(inferred, 0, None).wait()
    assert inferred.tolist() == [4] * 3


def test_messages_to_oneself_keep_their_order_by_tag():
    messages = SelfMessages(3)
    first, second, other = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    early = messages.receive(first, 7, None)
    messages.send(torch.ones(2), 7)
    assert early.wait()
    sent = torch.full((2,), 2.0)
    messages.send(sent, 7)
    messages.send(torch.full((2,), 3.0), 8)
    sent.zero_()  # what was sent is a copy
    arrived = []
    late = messages.receive(second, 7, lambda: arrived.append(second.tolist()))
    assert messages.holds(8)
    messages.receive(other, 8, None).wait()
    assert late.wait()
    assert [first.tolist(), second.tolist(), other.tolist()] == [[1, 1], [2, 2], [3, 3]]
    assert arrived == [[2, 2]]
    assert late.source_rank() == 3
    assert not messages.holds(7)


def test_messages_to_oneself_that_never_come_or_do_not_fit():
    messages = SelfMessages(0)
    with pytest.raises(DistBackendError, match="waits for a message from itself"):
        messages.receive(torch.zeros(1), 0, None).wait()
    messages = SelfMessages(0)
    messages.send(torch.zeros(3), 0)
    with pytest.raises(DistBackendError, match="does not fit"):
        messages.receive(torch.zeros(2), 0, None).wait()
