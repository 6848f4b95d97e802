"""Messages reach the rank they are for, in order, by tag, from anyone, and to oneself."""

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch

import hpcdist as dist
from hpcdist.backends.mpi.datatypes import BYTE
from hpcdist.backends.mpi.point_to_point import PointToPoint
from hpcdist.backends.mpi.receives import MatchedReceive
from hpcdist.backends.mpi.retired import KEPT
from hpcdist.core.errors import MismatchError
from hpcdist.core.journal import Journal
from hpcdist.core.waiting import wait_until
from hpcdist.core.work import Unfinished
from tests.ranks import sum_of_ranks

from .expected import same, values
from .refused import freed, frozen


def test_any_source_and_tags(rank, size):
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            tensor = torch.empty(1)
            sender = dist.recv(tensor, tag=7)
            assert tensor.item() == sender
            seen.add(sender)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0, tag=7)
    dist.barrier()
    if rank == 0 and size > 1:
        first, second = torch.empty(1), torch.empty(1)
        dist.recv(second, 1, tag=2)
        dist.recv(first, 1, tag=1)
        assert (first.item(), second.item()) == (10, 20)
    elif rank == 1:
        works = [dist.isend(torch.tensor([10.0 * tag]), 0, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()


@pytest.mark.parametrize("count", [100, 1_000_000])
@pytest.mark.parametrize("late", ["sender", "receiver", "receiver from anyone"])
def test_messages_move_while_a_rank_waits_outside_mpi(two_ranks, rank, late, count):
    """The late rank begins its message, and waits for it only after what the other does next."""
    others = dist.new_group(range(2), backend="gloo")  # whose barrier makes no call of MPI
    if rank == 0:
        work = dist.isend(values(0, count, torch.float32), 1)
        if late != "sender":
            work.wait()
        dist.barrier(others)
        work.wait()
    elif rank == 1:
        received = torch.zeros(count)
        work = dist.irecv(received, None if late == "receiver from anyone" else 0)
        if late == "sender":
            work.wait()
        dist.barrier(others)
        work.wait()
        assert same(received, values(0, count, torch.float32))
    if rank < 2:
        dist.destroy_process_group(others)


def test_futures_of_messages_end_though_nobody_waits(two_ranks, rank, size):
    received = torch.empty(3)
    futures = [
        dist.irecv(received, (rank - 1) % size).get_future(),
        dist.isend(torch.full((3,), float(rank)), (rank + 1) % size).get_future(),
    ]
    deadline = time.monotonic() + 30
    while not all(future.done() for future in futures):
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    assert futures[0].value()[0].tolist() == [float((rank - 1) % size)] * 3


@pytest.mark.parametrize("ops", [dist, torch.distributed], ids=["hpcdist", "torch"])
def test_batch_with_neighbours_and_oneself(ops, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    from_left, from_right, from_self = torch.empty(3), torch.empty(3), torch.empty(3)
    batch = [
        dist.P2POp(ops.irecv, from_left, left, tag=1),
        dist.P2POp(ops.irecv, from_right, right, tag=2),
        dist.P2POp(ops.irecv, from_self, rank, tag=3),
        dist.P2POp(ops.isend, torch.full((3,), float(rank)), right, tag=1),
        dist.P2POp(ops.isend, torch.full((3,), float(rank)), left, tag=2),
        dist.P2POp(ops.isend, torch.full((3,), 100.0 + rank), rank, tag=3),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert (from_left[0], from_right[0], from_self[0]) == (left, right, 100 + rank)


def test_receive_tells_its_sender(rank, size):
    tensor = torch.empty(1)
    work = dist.irecv(tensor, tag=5)
    sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % size, tag=5)
    assert work.wait()
    sent.wait()
    assert work.source_rank() == (rank - 1) % size == tensor.item()
    assert work.is_success()


@pytest.mark.parametrize("numel", [1, 10_000])  # Open MPI's large ones are matched, MPICH's all from anyone
def test_receives_from_anyone_keep_their_place_among_those_that_name_a_sender(every, rank, numel):
    for number in range(20):
        if rank == 0:
            first, second, other = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
            works = [dist.irecv(first, tag=3), dist.irecv(second, 1, tag=3), dist.irecv(other, 1, tag=4)]
            for work in works[:: (-1, 1)[number % 2]]:
                work.wait()
            assert (first[-1], second[-1], other[-1]) == (1, 2, 3)
            an_object = [None]
            work = dist.irecv(first)
            dist.recv_object_list(an_object, 1)
            work.wait()
            assert (first[-1], an_object) == (number, [{number}])
            large, small = torch.zeros(10_000), torch.zeros(1)
            works = [dist.irecv(large, 1, tag=5), dist.irecv(small, tag=5)]
            for work in works[:: (-1, 1)[number % 2]]:
                work.wait()
            assert (large[-1], small[-1]) == (4, 5)
        elif rank == 1:
            time.sleep(number % 4 * 1e-3)
            for value, tag in ((1, 3), (2, 3), (3, 4), (number, 0)):
                dist.send(torch.full((numel,), float(value)), 0, tag=tag)
            dist.send_object_list([{number}], 0)
            for each in (torch.full((10_000,), 4.0), torch.tensor([5.0])):
                dist.send(each, 0, tag=5)
    dist.barrier()


def test_a_receive_from_anyone_is_served_while_its_rank_is_in_another_call(every, rank):
    large = torch.full((1 << 21,), float(rank))  # its sender blocks until it is received
    work = dist.irecv(large, tag=2) if rank == 0 else None
    dist.barrier()
    if rank == 1:
        dist.send(large, 0, tag=2)
    dist.barrier()
    if work is not None:
        assert work.wait()
        assert large.min() == 1


def test_dropped_sends_keep_their_buffers(rank, size):
    for i in range(30):
        dist.isend(torch.full((50_000,), float(rank + i)), (rank + 1) % size, tag=i)
    junk = [torch.full((50_000,), -7.0) for _ in range(30)]
    for i in range(30):
        tensor = torch.empty(50_000)
        dist.irecv(tensor, (rank - 1) % size, tag=i).wait()
        assert same(tensor, torch.full((50_000,), float((rank - 1) % size + i)))
    assert len(junk) == 30
    dist.barrier()


def test_groups_have_ranks_of_their_own(two_ranks, rank, size):
    group = dist.new_group([0, size - 1])
    tensor = torch.empty(1)
    if rank == 0:
        dist.send(torch.tensor([5.0]), group=group, group_dst=1)
    elif rank == size - 1:
        assert dist.recv(tensor, group=group, group_src=0) == 0
        assert tensor.item() == 5
    else:
        with pytest.warns(UserWarning, match="does not belong"):
            assert dist.recv(tensor, 0, group) == -1
        with pytest.warns(UserWarning, match="does not belong"):
            assert dist.isend(tensor, 0, group) is None
    if rank in (0, size - 1):
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.parametrize("numel", [1, 1_000_000])
@pytest.mark.parametrize("is_late", [False, True])
def test_messages_that_nobody_has_received_end_with_their_group(two_ranks, is_late, numel, rank, request):
    if is_late:  # gloo's connections end with the first rank that destroys a group
        request.getfixturevalue("every")
    for _ in range(3):
        left = dist.new_group()
        if rank == 0:
            if is_late:
                time.sleep(0.05)  # the other ranks have destroyed the group by then
            work = dist.isend(torch.full((numel,), -1.0), 1, left)
        if not is_late:
            dist.barrier(left)
        dist.destroy_process_group(left)
        group = dist.new_group()  # MPI may give it the context of the group before
        tensor = torch.zeros(numel)
        if rank == 0:
            dist.send(torch.full((numel,), 7.0), 1, group)
            assert work is not None
        elif rank == 1:
            dist.recv(tensor, 0, group)
            assert tensor[0].item() == 7
        dist.destroy_process_group(group)


@pytest.mark.parametrize("numel", [0, 4])
@pytest.mark.usefixtures("every")
def test_no_length_is_made_up_for_a_long_message_to_oneself(numel, rank):
    work = dist.irecv(torch.zeros(numel), rank)
    dist.isend(torch.ones(9), rank).wait()
    with pytest.raises(ValueError, match=r"sent (more|36) bytes"):
        work.wait()


@pytest.mark.parametrize("end", ["destroy", "abort"])
@pytest.mark.usefixtures("every")
def test_a_wait_for_a_message_that_nobody_receives_ends_though_its_group_has_ended(end, rank, size):
    """The watchdog looks at the group no more."""
    group = dist.new_group()
    work = dist.isend(torch.zeros(1_000_000), None, group, group_dst=(rank + 1) % size)
    dist.barrier(group)
    dist.set_timeout(timedelta(seconds=1), group)
    if end == "destroy":
        dist.destroy_process_group(group)
    else:
        group.abort(ends_calls=False)
        dist.destroy_process_group(group)
    with pytest.raises(dist.DistBackendError, match=f"was {end}ed, and a message .* has not ended in 1 s"):
        work.wait()
    assert not work.is_completed()


@pytest.mark.parametrize("end", ["destroy", "abort"])
@pytest.mark.usefixtures("every")  # over gloo it waits until gloo's timeout
def test_a_receive_ends_with_its_group(end, rank):
    group, tensor = dist.new_group(), torch.zeros(1_000_000)
    if rank == 1:
        work = dist.irecv(tensor, 0, group)
        dist.destroy_process_group(group) if end == "destroy" else group.abort()
        with pytest.raises(dist.DistBackendError, match=rf"was {end}ed"):
            work.wait()
        del work
    dist.barrier()
    if rank == 0:
        dist.isend(torch.ones_like(tensor), 1, group)  # once more it would write there
    if rank != 1:
        dist.destroy_process_group(group) if end == "destroy" else group.abort()
    dist.barrier()
    dist.barrier()
    assert tensor.count_nonzero() == 0


@pytest.mark.parametrize("end", ["destroy", "abort"])
@pytest.mark.usefixtures("every")  # gloo's connections end with the group
def test_what_is_sent_stays_until_it_is_received_though_the_group_ends(end, rank):
    group, tensor = dist.new_group(), torch.full((1_000_000,), 3.0)
    if rank == 0:
        sent = weakref.ref(tensor)
        dist.isend(tensor, 1, group)
    if rank != 1:
        del tensor
        dist.destroy_process_group(group) if end == "destroy" else group.abort()
        del group
        gc.collect()
    if rank == 0:
        assert sent() is not None
    dist.barrier()
    if rank == 1:
        received = torch.zeros_like(tensor)
        dist.recv(received, 0, group)
        assert torch.equal(received, tensor)
        dist.destroy_process_group(group) if end == "destroy" else group.abort()
    dist.barrier()
    for _ in range(KEPT + 1):  # the last of them lets go of it
        dist.destroy_process_group(dist.new_group())
    if rank == 0:
        assert wait_until(lambda: sent() is None, 10)  # the progress thread may just be looking at it


def test_exchanges_do_not_meet_the_messages_of_a_group(two_ranks, rank):
    pair = dist.new_group([0, 1])
    if rank < 2:
        messages = [torch.full((1,), -1.0) for _ in range(4)]
        works = [dist.irecv(message, group=pair, group_src=1 - rank, tag=tag) for tag, message in enumerate(messages)]
        exchanged = torch.empty(2)
        dist.all_to_all_single(exchanged, torch.tensor([10.0, 20.0]) + rank, group=pair)
        assert exchanged.tolist() == [10.0 + 10 * rank, 11.0 + 10 * rank]
        for tag in range(4):
            dist.send(torch.tensor([float(tag)]), group=pair, group_dst=1 - rank, tag=tag)
        assert all(work.wait() for work in works)
        assert [message.item() for message in messages] == [0, 1, 2, 3]
        dist.destroy_process_group(pair)
    dist.barrier()


def test_own_splits_that_differ(world, rank, size):
    """The rank is told once the others have their shares."""
    if size < 2 or world.cpu.name != "mpi":
        pytest.skip("needs two ranks of MPI")
    for ranks in ([0, 1], list(range(size))):
        some = dist.new_group(ranks)
        if rank in ranks:
            # rank 0 sends itself one element, and receives two from itself
            others = [2] * (len(ranks) - 1)
            splits = ([2, *others], [1, *others])
            output, given = torch.zeros(2 * len(ranks)), torch.full((2 * len(ranks),), rank + 1.0)
            if rank == 0:
                with pytest.raises(ValueError, match=f"rank 0 of {len(ranks)} sends itself 4 bytes and receives 8"):
                    dist.all_to_all_single(output, given[1:], *splits, group=some)
                output[:2] = 1
            else:
                dist.all_to_all_single(output, given, group=some)
            assert torch.equal(output, torch.arange(1.0, len(ranks) + 1).repeat_interleave(2))
            assert sum_of_ranks(group=some) == len(ranks)
            dist.destroy_process_group(some)
    dist.barrier()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda tensor, rank, size: dist.send(tensor, rank), ValueError, "same as the rank of the current process"),
        (lambda tensor, rank, size: dist.recv(tensor, rank), ValueError, "same as the rank of the current process"),
        (lambda tensor, rank, size: dist.isend(tensor, size), ValueError, "not part of group"),
        (lambda tensor, rank, size: dist.isend(tensor), ValueError, "Must specify"),
        (lambda tensor, rank, size: dist.irecv(tensor, 0, group_src=0), ValueError, "both"),
        (lambda tensor, rank, size: dist.P2POp(dist.all_reduce, tensor, 0), ValueError, "op"),
        (lambda tensor, rank, size: dist.P2POp(dist.isend, [1], 0), TypeError, "tensor"),
        (lambda tensor, rank, size: dist.batch_isend_irecv([dist.isend]), ValueError, "p2p_op_list"),
        (lambda tensor, rank, size: dist.batch_isend_irecv([]), ValueError, "empty"),
        (lambda tensor, rank, size: dist.isend("text", rank), TypeError, "tensor"),
    ],
)
def test_bad_arguments(call, error, text, rank, size):
    with pytest.raises(error, match=text):
        call(torch.ones(1), rank, size)


REFUSED = {
    "read-only": (frozen, ValueError, "read-only"),
    "masked": (lambda: np.ma.ones(2), TypeError, "whose mask would be ignored"),
    "sparse": (lambda: torch.eye(2).to_sparse(), TypeError, "dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), TypeError, "nested"),
    "freed": (lambda: freed(2), ValueError, "storage was freed"),
    "part of what was freed": (lambda: freed(2, 1), ValueError, "storage was freed"),
    "meta": (lambda: torch.ones(2, device="meta"), RuntimeError, "device type meta"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("form", ["batch", "exchange", "asynchronous exchange"])
def test_what_one_message_cannot_carry_is_an_error_before_any_is_sent(form, kind, rank, size):
    make, error, text = REFUSED[kind]
    right, left, lost, got = (rank + 1) % size, (rank - 1) % size, torch.full((2,), 7.0), torch.zeros(2)

    def run(sent, received):
        if form == "batch":
            ops = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
            return [work.wait() for work in dist.batch_isend_irecv(ops)]
        work = dist.exchange({right: sent}, {left: received}, async_op=form != "exchange")
        return None if work is None else work.wait()

    with pytest.raises(error, match=text):
        run(lost, make())
    if kind != "read-only":
        with pytest.raises(error, match=text):
            run(make(), got)
    dist.barrier()
    run(torch.full((2,), float(rank)), got)  # not what was refused before
    assert got.tolist() == [float(left)] * 2


@pytest.mark.skipif(os.environ.get("HPCDIST_TEST_BACKEND", "mpi") != "mpi", reason="gloo takes the exact size only")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_short_message_leaves_the_rest_of_a_view_alone(is_async, rank, size):
    if rank == 0 and size > 1:
        dist.send(torch.ones(2), 1)
    if rank == 1:
        whole = torch.full((4, 2), 7.0)
        work = dist.irecv(whole[:, 0], 0) if is_async else dist.recv(whole[:, 0], 0)
        if is_async:
            work.wait()
        assert whole.tolist() == [[1, 7], [1, 7], [7, 7], [7, 7]]


def test_a_look_at_a_message_that_another_thread_has_completed(rank, size):
    received = torch.empty(1)
    work, sent = dist.irecv(received, (rank - 1) % size), dist.isend(torch.ones(1), (rank + 1) % size)
    assert work.wait()
    assert sent.wait()
    if hasattr(work, "_poll"):
        work._poll()  # as by a thread that saw it under way; MPI knows no more who the sender was
    assert work.source_rank() == (rank - 1) % size


# gloo tells that a message has ended to nobody but who waits for it
@pytest.mark.parametrize("waits", [True, False] if os.environ.get("HPCDIST_TEST_BACKEND", "mpi") == "mpi" else [True])
def test_messages_that_have_ended_are_let_go_of_though_an_older_one_is_under_way(waits, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    listener = dist.irecv(torch.empty(1), left, tag=99)
    seen = []
    for _ in range(100):
        received = torch.empty(40_000)
        sent, work = dist.isend(torch.zeros(40_000), right), dist.irecv(received, left)
        work.wait()
        if waits:
            sent.wait()
        seen.append(weakref.ref(received))
        del sent, work, received
    dist.barrier()
    dist.isend(torch.ones(1), right, tag=99).wait()
    few = waits or len(dist.group.WORLD.cpu.unfinished) < 50
    listener.wait()
    # the progress thread may just be looking at one of them
    assert wait_until(lambda: all(each() is None for each in seen), 5.0) if waits else few


def test_messages_that_repeat_but_for_one_fact(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size

    def exchange(sent, received, **kwargs):
        works = [dist.irecv(received, left, **kwargs), dist.isend(sent, right, **kwargs)]
        return [work.wait() for work in works]

    grid = torch.zeros(4, 4)
    for index in range(200):  # after which the checks of such a tensor are skipped
        exchange(torch.full((4,), float(index)), grid[0])
        assert grid[0].tolist() == [index] * 4
    for index in range(200):
        exchange(torch.arange(4.0) + index, grid[:, 1])  # strided
        assert grid[:, 1].tolist() == [index, index + 1, index + 2, index + 3]
    version = grid._version
    for index in range(200):
        exchange(torch.full((4,), float(index)).requires_grad_(), grid[2], tag=3)
        assert grid[2].tolist() == [index] * 4
    assert grid._version == version  # MPI writes where it is
    pair = torch.zeros(2)
    for index in range(200):
        exchange(torch.full((1,), float(index)).expand(2), pair.expand(3, 2)[0] if index % 2 else pair)
        assert pair.tolist() == [index] * 2
    received = np.zeros(4, dtype=np.float32)
    exchange(np.full(4, 6, dtype=np.float32), received)
    assert received.tolist() == [6] * 4
    if rank == 0 and size > 1:
        dist.send(received, 1)
    elif rank == 1:
        dist.recv(received, 0)
    exchange(torch.full((4,), 7), whole := torch.zeros(4, dtype=torch.int64))
    assert whole.tolist() == [7] * 4
    with pytest.raises(ValueError, match="not part of group"):
        dist.isend(grid[0], size)
    with pytest.raises(ValueError, match="Can't specify both"):
        dist.irecv(grid[0], left, group_src=left)
    with pytest.raises(ValueError, match="32767"):
        dist.irecv(grid[0], left, tag=32767)
    with pytest.raises(TypeError, match="dense"):
        dist.isend(grid.to_sparse(), right)
    for begin, peer in ((dist.isend, right), (dist.irecv, left)):
        for lost in (freed(4, 1, 2), freed(2), freed(2, 1)):
            with pytest.raises(ValueError, match="storage was freed"):
                begin(lost, peer)
    group = dist.new_group()
    for index in range(100):
        exchange(torch.full((4,), float(index)), grid[0], group=group)
    with pytest.raises(ValueError, match="the same group"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, grid[0], right, each) for each in (None, group)])
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="destroyed"):
        dist.isend(grid[0], right, group)


@pytest.mark.parametrize("numel", [2, 16_000, 40_000])  # the second is kept as a copy, and sent when it is received
def test_strided_messages_under_way_at_once(numel, rank, size):
    right, left, tags = (rank + 1) % size, (rank - 1) % size, range(5)
    group = dist.new_group()
    sent, received, works = torch.empty(numel, len(tags)), torch.empty(numel, len(tags)), []
    for turn in range(80):
        tag_order = tags if turn % 2 else reversed(tags)
        for tag in tags:
            sent[:, tag] = turn + tag + 100 * rank
        begun = [dist.isend(sent[:, tag], right, group, tag) for tag in tags]
        works = [dist.irecv(received[:, tag], None if turn % 3 else left, group, tag) for tag in tag_order]
        for work in works + begun:
            work.wait()
        assert received[0].tolist() == received[-1].tolist() == [turn + tag + 100 * left for tag in tags]
    assert all(
        work.result()[0].data_ptr() == received[:, tag].data_ptr() for tag, work in zip(tags, works, strict=True)
    )
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "form", ["recv", "recv from anyone", "irecv", "irecv early", "irecv from anyone early", "batch"]
)
@pytest.mark.parametrize(
    ("room", "count"), [(4, 5), (4, 9), (4, 3000), (4, 300_000), (9000, 9001), (9000, 30_000), (0, 1), (0, 100_000)]
)
def test_message_longer_than_its_tensor(every, rank, form, room, count):
    if rank == 1:
        if "early" in form:
            dist.barrier(_pair())
        sent = dist.isend(torch.ones(count), 0, tag=4)
        sent.wait()
        dist.send(torch.full((room + 1,), 7.0), 0, tag=4)
    elif rank == 0:
        whole = torch.zeros(count + 8)
        begun = []
        if form.startswith("irecv"):
            begun = [dist.irecv(whole[:room], None if "anyone" in form else 1, tag=4)]
        elif form == "batch":
            begun = dist.batch_isend_irecv([dist.P2POp(dist.irecv, whole[:room], 1, tag=4)])
        if "early" in form:
            dist.barrier(_pair())
        source = None if "anyone" in form else 1
        receive = begun[0].wait if begun else lambda: dist.recv(whole[:room], source, tag=4)
        with pytest.raises(MismatchError, match="rank 1 sent"):
            receive()
        assert not whole[room:].any()
        after = torch.zeros(room + 1)
        dist.recv(after, 1, tag=4)
        assert (after == 7).all()


class LongMessage:
    """A communicator whose receives get a message of more bytes than a C int counts."""

    def __init__(self):
        self.comm = self.receives = self
        self.posts_anyone, self.waiting, self.receiving, self.unfinished = True, [], {}, Unfinished()

    def Irecv(self, *_):
        return self

    Isend = begin = Irecv

    def Test(self, status):
        status.Set_elements(BYTE, 2**31 + 5)
        return True

    Wait = Test

    def too_long(self, call, status, nbytes):
        return MismatchError(f"{status.Get_elements(BYTE)} bytes for {nbytes}")

    def drive(self):
        return False


@pytest.mark.parametrize(
    "receive",
    [
        lambda messages, tensor: messages.recv(tensor, 0, 0),
        lambda messages, tensor: messages.irecv(tensor, 0, 0, None).wait(),
        lambda messages, tensor: messages.between([], [(tensor, 0)], 0)(Journal("group")),
    ],
    ids=["recv", "irecv", "exchange"],
)
def test_a_message_of_more_bytes_than_a_c_int_counts_is_too_long(receive):
    with pytest.raises(MismatchError, match="2147483653 bytes for 8"):
        receive(PointToPoint(LongMessage()), torch.ones(2))


_PAIR = []


def _pair():
    """A group of the first two ranks, made once by both."""
    if not _PAIR:
        _PAIR.append(dist.new_group([0, 1], use_local_synchronization=True))
    return _PAIR[0]


def test_message_of_another_dtype_and_a_shorter_one(every, rank):
    if rank == 1:
        dist.send(torch.ones(50_000, dtype=torch.float64), 0)
        dist.send(torch.ones(10), 0)
    elif rank == 0:
        whole = torch.zeros(100_000)
        with pytest.raises(MismatchError, match=r"400,000 bytes|more bytes"):
            dist.recv(whole[:50_000], 1)
        assert not whole[50_000:].any()
        received = torch.zeros(20_000)
        dist.recv(received, 1)
        assert received.sum() == 10


@contextlib.contextmanager
def _interruption():
    """Ctrl-C for this thread in 0.2 s, also under a shell that has its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def test_interrupted_receive_writes_nothing_later(every, rank):
    """Ctrl-C while it waits: its message is left for the next receive, or goes to memory that is still kept."""
    if rank == 1:
        dist.barrier(_pair())
        dist.send(torch.ones(100_000), 0, tag=6)
    elif rank == 0:
        for source in (None, 1):
            with pytest.raises((KeyboardInterrupt, RuntimeError)), _interruption():
                dist.recv(torch.zeros(100_000), source, tag=6)
        received = torch.zeros(100_000)
        dist.barrier(_pair())
        dist.recv(received, 1, tag=6)
        assert received.sum() == 100_000


def test_interrupted_receive_that_cannot_be_cancelled_keeps_its_memory(every, rank, monkeypatch):
    """As one whose message has begun to come; MPI writes it later."""
    if rank == 1:
        dist.barrier(_pair())
        dist.send(torch.ones(10_000), 0, tag=6)
    elif rank == 0:
        monkeypatch.setattr(MatchedReceive, "Cancel", lambda self: None)
        before = set(dist.group.WORLD.cpu.unfinished)
        with pytest.raises(KeyboardInterrupt), _interruption():
            dist.recv(torch.zeros(10_000), None, tag=6)  # matched by a probe on any MPI
        held = set(dist.group.WORLD.cpu.unfinished) - before
        dist.barrier(_pair())
        (kept,) = held
        kept.wait()
        assert kept.result()[0].sum() == 10_000
