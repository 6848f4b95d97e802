"""Subgroups are what was asked for, in one step, and gone when destroyed."""

import os
import socket
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch

import hpcdist as dist
from hpcdist import dist2
from hpcdist.backends.mpi.communicator import group_tag
from hpcdist.core.journal import RING, CallRecord
from hpcdist.core.world import WORLD
from hpcdist.torch_bridge.features import has
from tests.ranks import of_all_ranks, sum_of_ranks

IN_ORDER = has("`split_group` in the order given")


def test_new_group_of_every_pair(rank, size):
    for first in range(size):
        for second in range(first + 1, size):
            group = dist.new_group([second, first])
            if rank in (first, second):
                assert dist.get_process_group_ranks(group) == [first, second]
                assert dist.get_rank(group) == (0 if rank == first else 1)
                assert dist.get_group_rank(group, second) == 1
                assert dist.get_global_rank(group, 1) == second
                assert sum_of_ranks(rank, group) == first + second
                dist.destroy_process_group(group)
            else:
                assert group == dist.GroupMember.NON_GROUP_MEMBER
                assert dist.get_rank(group) == -1
                assert dist.get_world_size(group) == -1


def test_order_of_ranks(rank, size):
    order = list(range(size))[::-1]
    group = dist.new_group(order, sort_ranks=False, timeout=timedelta(seconds=7), group_desc="reversed")
    assert dist.get_rank(group) == size - 1 - rank
    assert group.group_desc == "reversed"
    assert group.timeout == timedelta(seconds=7)
    flat = torch.empty(size)
    dist.all_gather_single(flat, torch.tensor([float(rank)]), group)
    assert flat.tolist() == [float(r) for r in order]
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, src=0, group=group)
    assert tensor.item() == 0
    tensor.fill_(rank)
    dist.broadcast(tensor, group=group, group_src=0)
    assert tensor.item() == size - 1
    dist.destroy_process_group(group)


def test_local_synchronization(rank, size):
    members = [r for r in range(size) if r % 2 == 0]
    if rank in members:  # the others do not call
        group = dist.new_group(members, use_local_synchronization=True)
        again = dist.new_group(members, use_local_synchronization=True)
        assert sum_of_ranks(rank, group) == sum(members)
        assert group.group_name != again.group_name
        dist.destroy_process_group(group)
        dist.destroy_process_group(again)
    else:
        outside = torch.distributed.new_group(members, use_local_synchronization=True)
        assert dist.new_group(members, use_local_synchronization=True) == outside
    dist.barrier()


def test_new_subgroups(rank, size):
    for length in (n for n in range(1, size + 1) if size % n == 0):
        mine, every = dist.new_subgroups(length)
        assert len(every) == size // length
        assert every[rank // length] is mine
        assert all(g == dist.GroupMember.NON_GROUP_MEMBER for i, g in enumerate(every) if i != rank // length)
        start = rank // length * length
        assert sum_of_ranks(rank, mine) == sum(range(start, start + length))
        dist.destroy_process_group(mine)
    by_node, _ = dist.new_subgroups()
    hosts = of_all_ranks(socket.gethostname())
    assert dist.get_process_group_ranks(by_node) == [each for each in range(size) if hosts[each] == hosts[rank]]
    dist.destroy_process_group(by_node)
    for bad in (0, -1, size + 1, *([size - 1] if size > 2 else [])):
        with pytest.raises(ValueError, match="group_size"):
            dist.new_subgroups(bad)


def test_subgroups_by_node(rank, size, monkeypatch):
    monkeypatch.setenv("HPCDIST_NODE_KEY", f"node{rank % 2}")
    mine, every = dist.new_subgroups()
    assert len(every) == min(2, size)
    assert dist.get_process_group_ranks(mine) == list(range(rank % 2, size, 2))
    dist.destroy_process_group(mine)


def test_enumeration_with_ranks_left_out(rank, size):
    if size < 3:
        pytest.skip("needs three ranks")
    mine, every = dist.new_subgroups_by_enumeration([[2, 0]])
    assert len(every) == 1
    if rank in (0, 2):
        assert sum_of_ranks(rank, mine) == 2
        dist.destroy_process_group(mine)
    else:
        assert mine is None
    with pytest.raises(ValueError, match="both subgroup"):
        dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="empty"):
        dist.new_subgroups_by_enumeration([])


def test_split_group(two_ranks, rank, size):
    parent = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    child = dist.split_group(parent, [[0], list(range(1, size))])
    me = dist.get_rank(parent)
    assert dist.get_process_group_ranks(child) == ([size - 1] if me == 0 else list(range(size - 1))[::-1])
    assert sum_of_ranks(rank, child) == (size - 1 if me == 0 else sum(range(size - 1)))
    partial, outside = dist.split_group(None, [[0]]), dist.GroupMember.NON_GROUP_MEMBER if IN_ORDER else None
    assert (partial == outside) == (rank != 0)
    turned = dist.split_group(None, [list(range(size))[::-1]])
    assert dist.get_process_group_ranks(turned) == sorted(range(size), reverse=IN_ORDER)
    for bad in ([], [[]], [[0, 0]], [[0], [0]], [[size]]):
        with pytest.raises(ValueError, match=r"split|subgroup|duplicate|out of range"):
            dist.split_group(parent, bad)
    with pytest.raises(ValueError, match="mismatch"):
        dist.split_group(parent, [[0]], backend="cpu:nccl")


def test_splits_of_two_parents_have_the_same_names_on_all_ranks_in_whatever_order(rank, size):
    """Threads of a rank may split two groups of the same ranks, each at its time; names of one world are unique."""
    ranks, groups = list(range(size)), [dist.new_group(), dist.new_group()]
    names, everywhere = {}, [None] * size
    for index in (0, 1) if rank % 2 else (1, 0):
        names[index] = [groups[index].next_name(ranks) for _ in range(2)]
    dist.all_gather_object(everywhere, names)
    assert everywhere == size * [names]
    assert len({*names[0], *names[1]}) == 4


def test_non_members_are_told_and_do_not_communicate(two_ranks, rank):
    group = dist.new_group([0])
    tensor = torch.ones(1)
    calls = [
        lambda: dist.all_reduce(tensor, group=group),
        lambda: dist.broadcast(tensor, 0, group),
        lambda: dist.reduce(tensor, 0, group=group, async_op=True),
        lambda: dist.all_gather([tensor], tensor, group),
        lambda: dist.gather(tensor, None, 0, group),
        lambda: dist.scatter(tensor, None, 0, group),
        lambda: dist.reduce_scatter(tensor, [tensor], group=group),
        lambda: dist.all_to_all([tensor], [tensor], group),
        lambda: dist.all_to_all_single(tensor, tensor, group=group),
        lambda: dist.barrier(group),
        lambda: dist.all_reduce_coalesced([tensor], group=group),
    ]
    for call in calls:
        if rank == 0:
            continue
        with pytest.warns(UserWarning, match="which does not belong to the given group"):
            assert call() is None
    if rank:
        for ask in (dist.get_backend, dist.get_backend_config, dist.get_process_group_ranks):
            with pytest.raises(ValueError, match="Invalid process group"):
                ask(group)
        dist.destroy_process_group(group)  # nothing to do
    else:
        assert sum_of_ranks(5, group) == 5
        dist.destroy_process_group(group)
    dist.barrier()


def test_a_destroyed_group_says_so(rank, size):
    group = dist.new_group()
    dist.destroy_process_group(group)
    for call in (
        lambda: dist.all_reduce(torch.ones(1), group=group),
        lambda: dist.get_backend(group),
        lambda: dist.send(torch.ones(1), 0, group),
        lambda: dist.all_gather_object([None] * size, 1, group),
        lambda: dist.destroy_process_group(group),
    ):
        with pytest.raises(ValueError, match="Invalid process group specified"):
            call()
    assert "destroyed" in repr(group)


def test_counts_and_names(rank, size):
    before = dist.get_pg_count()
    group = dist.new_group()
    assert dist.get_pg_count() == before + 1
    assert isinstance(group, torch.distributed.ProcessGroup)
    assert isinstance(group, dist.ProcessGroup)
    assert (group.rank(), group.size()) == (rank, size)
    assert group.group_name == group.pg_name
    assert dist.get_backend(group) == dist.get_backend()
    dist.destroy_process_group(group)


def test_warnings_are_not_given_to_members(rank, size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum_of_ranks() == size
        assert sum_of_ranks(1, dist.group.WORLD) == size


def test_groups_are_made_behind_queued_calls(rank, size):
    queued = [torch.full((50_000,), float(rank)) for _ in range(10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in queued]
    group = dist.new_group()
    pair = dist.new_subgroups(1)[0]
    for work in works:
        work.wait()
    assert all(tensor[-1] == sum(range(size)) for tensor in queued)
    assert sum_of_ranks(1, group) == size
    assert sum_of_ranks(rank, pair) == rank
    dist.all_reduce(queued[0], async_op=True)
    local = dist.new_group(list(range(size)), use_local_synchronization=True)
    assert sum_of_ranks(1, local) == size


def test_monitored_barrier(rank, size):
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
    group = dist.new_group()
    dist.monitored_barrier(group)
    if rank == 0 and size > 1:
        with pytest.raises(dist.DistBackendError, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(group, timedelta(seconds=0.3))


@pytest.mark.parametrize("timeout", ["5", [5], b""], ids=repr)
def test_a_monitored_barrier_takes_a_timedelta_or_seconds(timeout):
    with pytest.raises(TypeError, match="Expected timeout argument"):
        dist.monitored_barrier(timeout=timeout)
    dist.monitored_barrier(timeout=60)


@pytest.mark.skipif(os.environ.get("HPCDIST_TEST_BACKEND") == "gloo", reason="gloo has a barrier of its own")
def test_monitored_barriers_count_no_rank_that_came_late_or_gave_up(rank, size):
    if size == 1:
        return
    group, last = dist.new_group(), size - 1
    word = torch.ones(1, device="cpu")  # whose messages are over when the call is

    def fails():
        with pytest.raises(dist.DistBackendError, match="monitoredBarrier"):
            dist.monitored_barrier(group, timedelta(seconds=0.2), wait_all_ranks=True)

    for _ in range(2):
        if rank != last:
            fails()
        if rank == 0:
            dist.send(word, last)
            dist.recv(word, last)
        if rank == last:
            dist.recv(word, 0)
            fails()  # the others are gone, and wait for it in none of the barriers that follow
            dist.send(word, 0)
    dist.monitored_barrier(group, timedelta(seconds=30))
    if rank:  # now the first rank is late, when the others have given up
        fails()
        dist.send(word, 0)
        dist.recv(word, 0)
    else:
        for other in range(1, size):
            dist.recv(word, other)
        fails()
        for other in range(1, size):
            dist.send(word, other)
    dist.monitored_barrier(group, timedelta(seconds=30))
    if rank == 0:  # the others miss one, which does not matter after the next collective
        fails()
    dist.barrier(group)
    dist.monitored_barrier(group, timedelta(seconds=30))
    dist.destroy_process_group(group)


def test_tags_of_groups_made_by_their_members(world):
    names = [f"{index:040x}" for index in range(20_000)]
    tags = [group_tag(name) for name in names]
    assert len(set(tags)) > 14_000  # of 20,000 names that fall on 32,768 tags at random
    assert 0 <= min(tags) <= max(tags) <= 32767
    everywhere = of_all_ranks(tags[:100])
    assert all(each == tags[:100] for each in everywhere)


def test_the_limit_of_a_group_is_set_and_its_backend_is_shown(world, rank, size):
    group = dist.new_group()
    before = group.timeout
    dist.set_timeout(timedelta(seconds=77), group)
    assert group.timeout == timedelta(seconds=77)
    device = next(iter(group.backends))
    shown = dist.get_backend_impl(group, torch.device(device))
    assert (shown.options._timeout, shown.name(), shown.size()) == (group.timeout, group.backends[device].name, size)
    assert dist.get_backend_impl(group.group_name, torch.device(device)).options._timeout == group.timeout
    with pytest.raises(ValueError, match="'nobody' is not a live group"):
        dist.get_backend_impl("nobody")
    if len(set(group.backends.values())) == 1:
        assert dist.get_backend_impl(group).name() == shown.name()
    else:
        with pytest.raises(ValueError, match="has several backends"):
            dist.get_backend_impl(group)
    assert before != group.timeout
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=78), group)
    assert group.timeout == timedelta(seconds=78)
    for wrong in (3.0, None):
        with pytest.raises(TypeError, match=r"datetime\.timedelta"):
            dist.set_timeout(wrong, group)
    dist.destroy_process_group(group)


def gloos_options(**values):
    options = dist.ProcessGroupGloo._Options()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def test_each_rank_may_give_only_its_own_list(rank, size):
    """As for torch.distributed; the lists of the others follow from nothing that is sent."""
    half = (size + 1) // 2
    mine = list(range(half)) if rank < half else list(range(half, size))
    for group in (
        dist.new_group(mine),
        dist.new_subgroups_by_enumeration([mine])[0],
        dist.new_group(mine, backend=dist.get_backend() if torch.empty(0).is_cuda else "gloo"),
    ):
        assert dist.get_process_group_ranks(group) == mine
        assert sum_of_ranks(rank, group) == sum(mine)
        dist.destroy_process_group(group)


@pytest.mark.parametrize("make", ["new_group", "unsorted", "subgroups", "split_group", "another backend"])
def test_lists_that_contradict_each_other_are_an_error_on_every_rank(two_ranks, make, rank, size):
    everyone, fewer = list(range(size)), list(range(size - 1))
    mine = everyone if rank == 0 else everyone[::-1] if make == "unsorted" else [rank]
    if make in ("subgroups", "split_group") and rank == 0:
        mine = fewer if size > 2 else everyone
    calls = {
        "new_group": lambda: dist.new_group(mine),
        "unsorted": lambda: dist.new_group(mine, sort_ranks=False),
        "subgroups": lambda: dist.new_subgroups_by_enumeration([mine]),
        "split_group": lambda: dist.split_group(split_ranks=[mine]),
        "another backend": lambda: dist.new_group(mine, backend="gloo"),
    }
    with pytest.raises(ValueError, match=r"new_group: rank .* gave the ranks .*, and rank .* gave"):
        calls[make]()
    group = dist.new_group()  # the world takes calls
    assert sum_of_ranks(1, group) == size
    dist.destroy_process_group(group)


SHORT = timedelta(seconds=1)  # in which all ranks must make the group, on a busy machine too


# whatever makes a group of some ranks
WAYS = {
    "new_group": lambda ranks: dist.new_group(ranks, timeout=SHORT),
    "local": lambda ranks: dist.new_group(ranks, timeout=SHORT, use_local_synchronization=True),
    "split_group": lambda ranks: dist.split_group(split_ranks=[ranks], timeout=SHORT),
    "method": lambda ranks: dist.group.WORLD.split_group(ranks, timeout=SHORT),
    "dist2": lambda ranks: dist2.new_group("mpi", SHORT, "cpu"),
    "torch": lambda ranks: torch.distributed.new_group(ranks, timeout=SHORT),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_group_is_watched(way, world, rank, size):
    """A message that nobody sends ends at the group's limit, whatever made the group."""
    if size == 1 or world.config != "mpi":
        pytest.skip("needs another rank, and MPI")
    group = WAYS[way](list(range(size)))
    assert WORLD.has(group)
    assert group in list(WORLD.watched())
    if way in ("local", "method"):  # the first call of the members, which has the limit too
        made = next(each for each in reversed(RING.calls) if each[0] is world.journal and each[2] == "create_group")
        assert CallRecord(*made).limit == SHORT.total_seconds()
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"has not ended .*the timeout is 1 s"):
            dist.recv(torch.ones(1, device="cpu"), group=group, group_src=1)
    dist.barrier()
    group.shutdown()
    assert not WORLD.has(group)


def test_a_method_keeps_its_limit_on_gloo(two_ranks, rank):
    """The library ends the call; on MPI the watchdog does (``tests/unit/test_journal.py``)."""
    if torch.empty(0).is_cuda:
        pytest.skip("gloo carries CPU tensors")
    group = dist2.new_group("gloo", timedelta(seconds=60), "cpu")
    if rank == 0:
        options = torch.distributed.AllreduceOptions()
        options.timeout = SHORT
        with pytest.raises(dist.DistBackendError, match=r"(?i)timed out"):
            group.allreduce([torch.ones(1)], options).wait()
    dist.barrier()
    group.abort()
    WORLD.remove(group)


def test_one_group_that_cannot_be_freed_leaves_no_other_open(rank, monkeypatch):
    """All are ended, with their threads, and the first error is raised."""
    first, second = dist.new_group(), dist.new_group()
    dist.all_reduce(torch.ones(1), group=first, async_op=True).wait()
    backend, queue = first.any_backend(), first.any_backend().open_queue()
    parent = dist.group.WORLD
    monkeypatch.setattr(dist.group.WORLD, "close", lambda: None)  # the other tests go on with it

    def fail(reason=None):
        raise RuntimeError(f"rank {rank} cannot free it")

    monkeypatch.setattr(second.any_backend(), "close", fail)
    with monkeypatch.context() as context:
        context.setattr(WORLD, "clear", lambda: None)
        with pytest.raises(RuntimeError, match=f"rank {rank} cannot free it"):
            dist.destroy_process_group()
    assert not first.backends
    assert not second.backends
    assert backend.queue is None
    assert not queue._thread.is_alive()
    assert dist.group.WORLD is parent
    for group in (first, second):
        WORLD.remove(group)


def test_no_other_thread_begins_a_call_while_its_group_ends(monkeypatch):
    group = dist.new_group()
    dist.barrier(group)
    backend, threads, raised = group.any_backend(), [], []
    close = backend.close

    def call():
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except ValueError as error:
            raised.append(str(error))

    def call_and_close():
        threads.append(threading.Thread(target=call))
        threads[0].start()
        threads[0].join()
        close()

    monkeypatch.setattr(backend, "close", call_and_close)
    dist.destroy_process_group(group)
    assert len(raised) == 1, raised
    assert "is not a live group" in raised[0]
    made = group.sequence
    group.close()  # once more, as torch does
    assert group.sequence == made


MAKERS = {
    "new_group": lambda size, options: dist.new_group(pg_options=options),
    "local": lambda size, options: dist.new_group(
        list(range(size)), pg_options=options, use_local_synchronization=True
    ),
    "new_subgroups": lambda size, options: dist.new_subgroups(size, pg_options=options)[0],
    "split_group": lambda size, options: dist.split_group(split_ranks=[list(range(size))], pg_options=options),
    "method": lambda size, options: dist.group.WORLD.split_group(list(range(size)), opts=options),
}


def test_the_same_ranks_are_made_a_group_again_and_again(world, size):
    everyone = list(range(size))
    groups = [world.split_group(everyone, group_name=name) for name in (None, None, "named", "named") * 5]
    assert len({group.group_name for group in groups}) == 11
    for group in groups:
        assert sum_of_ranks(1, group) == size
        group.shutdown()


def test_members_make_a_group_while_a_thread_makes_a_communicator(rank, size):
    """In Open MPI the two wait for each other, unless all members have come before they make the group."""
    group = dist.new_group()
    sum_of_ranks(group=group)
    values = torch.ones(1_000_000)
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(values, group=group, async_op=True)  # its first call that needs the nodes
        time.sleep(0.2)
    else:
        time.sleep(0.6)
        work = dist.all_reduce(values, group=group, async_op=True)
        work.wait()
    made = dist.new_group(list(range(size)), use_local_synchronization=True)
    work.wait()
    assert values[0] == size
    assert sum_of_ranks(group=made) == size
    dist.destroy_process_group(made)
    dist.destroy_process_group(group)


def test_a_group_may_end_on_a_rank_before_others_have_made_it(size):
    for _ in range(25):
        group = dist.new_group()
        assert group.size() == size
        group.shutdown()


@pytest.mark.parametrize("make", MAKERS)
def test_options_of_a_group(make, size):
    theirs = dist.get_backend_impl(device=torch.device("cpu")).options
    group = MAKERS[make](size, theirs)
    assert group.size() == size
    group.shutdown()
    with pytest.warns(UserWarning, match="does not use these options of _?Options: .*_threads"):
        group = MAKERS[make](size, gloos_options(_timeout=timedelta(seconds=3)))
    assert group.timeout == dist.group.WORLD.timeout  # the argument timeout= says it, as in c10d
    group.shutdown()
    with pytest.raises(TypeError, match=r"got 42 of type int.*None or c10d's options"):
        MAKERS[make](size, 42)
    dist.barrier()


@pytest.mark.parametrize("is_left", [False, True])
def test_communicators_of_a_call_that_was_left_are_kept(is_left, size):
    if size == 1 or dist.get_backend() != "mpi":
        pytest.skip("needs MPI's communicators")
    group = dist.new_group()
    dist.all_reduce(torch.ones(1 << 20, dtype=torch.bfloat16), group=group)  # through shared memory on every MPI
    backend = group.cpu
    places = backend.collectives.node._places
    if backend.collectives.node.shared is None:
        pytest.skip("no shared memory here")
    backend.communicator.left_by = "KeyboardInterrupt" if is_left else None
    dist.destroy_process_group(group)
    from mpi4py import MPI

    assert (places.node == MPI.COMM_NULL) is not is_left  # which a freed one is
