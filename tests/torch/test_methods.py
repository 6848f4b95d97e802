"""What torch's libraries call on a group: c10d's methods on lists and options."""

import gc
import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor.debug import CommDebugMode

import hpcdist as dist
from hpcdist.backends.mpi.retired import KEPT
from hpcdist.core.journal import RING
from tests.ranks import of_all_ranks, sum_of_ranks


@pytest.fixture(params=["mine", "theirs"])
def pg(request, world):
    """The group as Python has it, and as C++ hands it back by its name."""
    if request.param == "mine":
        return world
    return torch_dist.distributed_c10d._resolve_process_group(world.group_name)


def test_wrong_splits(pg, size):
    with pytest.raises(RuntimeError, match="Split sizes"):
        pg.alltoall_base(torch.empty(size), torch.empty(size), [1] * size, [2] * size).wait()


def test_coalesced(pg, rank, size):
    tensors = [torch.full((2,), float(rank)), torch.full((3,), rank, dtype=torch.int64)]
    pg.allreduce_coalesced(tensors).wait()
    assert [each[0].item() for each in tensors] == [sum(range(size))] * 2
    outputs = [torch.empty(size), torch.empty(2 * size)]
    pg.allgather_into_tensor_coalesced(outputs, [torch.full((1,), float(rank)), torch.full((2,), float(rank))]).wait()
    torch.testing.assert_close(outputs[0], torch.arange(float(size)))
    with torch_dist._coalescing_manager(async_ops=True) as manager:
        ones = [torch.ones(2) for _ in range(3)]
        for each in ones:
            torch_dist.all_reduce(each)
    manager.wait()
    assert all(each[0] == size for each in ones)
    with torch_dist._coalescing_manager(device=torch.device("cpu")):
        torch_dist.broadcast(ones[0], src=0)
        torch_dist.all_reduce(ones[1], op=dist.ReduceOp.MAX)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_an_error_inside_torchs_coalescing_manager_leaves_nothing_held_back(device, size):
    tensor = torch.ones(2)

    def fail():
        with torch_dist._coalescing_manager(device=device):
            torch_dist.all_reduce(torch.ones(2))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    torch_dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 2
    with torch_dist._coalescing_manager(device=device):
        torch_dist.all_reduce(tensor)
    assert tensor.tolist() == [size**2] * 2


def test_monitored_barrier(pg, rank, size):
    pg.monitored_barrier(timedelta(seconds=30))
    pg.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
    if rank == 0 and size > 1:
        with pytest.raises(dist.DistBackendError, match="Rank 0 timed out in monitoredBarrier"):
            pg.monitored_barrier(timedelta(0))
    pg.barrier().wait()


def test_torchs_monitored_barrier_takes_our_groups(pg, rank, size):
    torch_dist.monitored_barrier(pg)
    torch_dist.monitored_barrier(pg, timeout=timedelta(seconds=30), wait_all_ranks=True)
    torch_dist.distributed_c10d.monitored_barrier(group=pg, timeout=timedelta(seconds=30))
    last = size - 1
    if rank != last:  # the last one does not come
        with pytest.raises(RuntimeError, match="monitoredBarrier") as caught:
            torch_dist.monitored_barrier(pg, timeout=timedelta(seconds=2))
        if rank == 0:
            assert f"Rank {last} failed to pass monitoredBarrier in 2000 ms" in str(caught.value)
    pg.barrier().wait()


def test_torchs_monitored_barrier_still_takes_gloos(gloo):
    torch_dist.monitored_barrier(gloo, timeout=timedelta(seconds=30))


@pytest.mark.parametrize("make", [dist.new_group, torch_dist.new_group])
def test_sequence_numbers(rank, size, make):
    group = make(list(range(size)))

    def numbers():
        return of_all_ranks(group._get_sequence_number_for_group())

    group._set_sequence_number_for_group()
    first = numbers()
    assert len(set(first)) == 1
    for step in range(3):
        torch_dist.all_reduce(torch.ones(1), group=group)
        group.allreduce([torch.ones(1)]).wait()
        group.barrier().wait()
        assert numbers() == [first[0] + 3 * (step + 1)] * size
    late = None if rank in (0, 2) else torch_dist.all_reduce(torch.ones(1), group=group, async_op=True)
    behind = numbers()
    assert [each - behind[0] for each in behind] == [0, 1, 0, 1][:size]
    if late is None:
        torch_dist.all_reduce(torch.ones(1), group=group)
    else:
        late.wait()
    torch_dist.destroy_process_group(group)


def test_the_backend_of_a_group(pg, rank, size):
    backend = pg._get_backend(torch.device("cpu"))
    assert (backend.rank(), backend.size()) == (rank, size)
    assert backend.options._timeout == pg.timeout
    assert list(backend.options.global_ranks_in_group) == list(range(size))
    before = pg.timeout
    backend._set_default_timeout(timedelta(seconds=77))
    assert pg.timeout == backend.options._timeout == timedelta(seconds=77)
    backend.set_timeout(before)
    tensor = torch.ones(3)
    backend.allreduce([tensor]).wait()
    assert tensor.tolist() == [size] * 3
    gathered = [torch.zeros(1) for _ in range(size)]
    backend.allgather([gathered], [torch.full((1,), float(rank))]).wait()
    assert [each.item() for each in gathered] == list(range(size))
    works = [backend.send([torch.full((1,), float(rank))], (rank + 1) % size, 0)]
    works.append(backend.recv([tensor[:1]], (rank - 1) % size, 0))
    for work in works:
        work.wait()
    assert tensor[0] == (rank - 1) % size
    backend.barrier().wait()
    with pytest.raises(AttributeError, match="has no attribute 'alreduce'"):
        backend.alreduce([tensor])


def test_messages(pg, rank, size):
    mine, theirs = torch.full((2,), float(rank)), torch.empty(2)
    sent = pg.send([mine], (rank + 1) % size, 4)
    received = pg.recv([theirs], (rank - 1) % size, 4)
    received.wait()
    sent.wait()
    assert theirs[0] == (rank - 1) % size
    sent = pg.send([mine], (rank + 1) % size, 5)
    received = pg.recv_anysource([theirs], 5)
    received.wait()
    sent.wait()
    assert received._source_rank() == (rank - 1) % size


def test_the_forms_without_options(pg, rank, size):
    tensor = torch.ones(2)
    pg.allreduce(tensor).wait()
    assert tensor[0] == size
    pg.allreduce([tensor], dist.ReduceOp.MAX).wait()
    pg.broadcast(tensor, 0).wait()
    pg.barrier().wait()
    outputs = [torch.empty(2) for _ in range(size)]
    pg.allgather(outputs, tensor).wait()
    assert outputs[-1][0] == size


def test_a_part_of_the_group(pg, rank, size):
    part = pg.split_group([0, size - 1] if size > 1 else [0])
    if rank not in (0, size - 1):
        assert part is None
        return
    tensor = torch.ones(1)
    part.allreduce([tensor]).wait()
    assert tensor.item() == min(size, 2)
    part.shutdown()


def test_an_abort_takes_no_other_rank_and_ends_receives(rank, size):
    group = torch_dist.new_group()
    dist.all_reduce(torch.ones(1 << 16), group=group)
    work = torch_dist.irecv(torch.empty(3), (rank + 1) % size, group)
    if rank:
        dist.barrier()  # until rank 0 has ended the group
    group.abort()
    # a process by itself, without MPI, knows from the beginning that it has not sent such a message
    with pytest.raises(dist.DistBackendError, match="was aborted" if size > 1 else "was aborted|from itself"):
        work.wait()
    with pytest.raises(ValueError, match="destroyed or aborted"):
        torch_dist.all_reduce(torch.ones(1), group=group)
    if not rank:
        dist.barrier()
    torch_dist.destroy_process_group(group)


def test_torchs_functions_take_our_groups(rank, size):
    group = dist.new_group(list(range(size)))
    assert torch_dist.get_rank(group) == rank
    assert torch_dist.get_world_size(group) == size
    assert torch_dist.get_backend(group) == "hpcdist"
    assert torch_dist.get_process_group_ranks(group) == list(range(size))
    gathered = [None] * size
    torch_dist.all_gather_object(gathered, {"rank": rank}, group=group)
    assert gathered[-1] == {"rank": size - 1}
    sampler = torch.utils.data.DistributedSampler(range(8 * size))
    assert len(list(sampler)) == 8
    dist.destroy_process_group(group)
    with pytest.raises((ValueError, KeyError)):
        torch_dist.get_process_group_ranks(group)


def test_our_functions_take_torchs_groups(rank, size):
    group = torch_dist.new_group(list(range(size)))
    assert sum_of_ranks(group=group) == size
    for asked in (None, "mpi"):
        local = torch_dist.new_group([rank], backend=asked, use_local_synchronization=True)
        assert dist.get_world_size(local) == 1
        assert torch_dist.get_backend(local) == (asked or torch_dist.get_backend())
    torch_dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="not a live group"):
        sum_of_ranks(group=group)


def test_local_groups_of_members_in_different_numbers_of_groups(rank, size):
    made = []
    for turn in range(3):  # torch's own names count the groups of the process
        if rank == 0:
            made.append(torch_dist.new_group([0], use_local_synchronization=True))
        if rank in (0, size - 1):
            made.append(torch_dist.new_group(sorted({0, size - 1}), use_local_synchronization=True))
            tensor = torch.tensor([turn + 1.0])
            torch_dist.all_reduce(tensor, group=made[-1])
            assert tensor[0] == (turn + 1) * len({0, size - 1})
            names = [None] * len({0, size - 1})
            torch_dist.all_gather_object(names, made[-1].group_name, group=made[-1])
            assert len(set(names)) == 1
            if turn:  # frees a number
                torch_dist.destroy_process_group(made.pop(-2 if rank == 0 else -1))
    assert len({each.group_name for each in made}) == len(made)
    for each in made:
        torch_dist.destroy_process_group(each)
    torch_dist.destroy_process_group(torch_dist.new_group(list(range(size))))  # one name on all ranks, after that too


def test_groups_are_forgotten(rank, size):
    under_way = dist.irecv(torch.zeros(1), (rank + 1) % size)  # so that the progress thread looks at all groups

    def objects():
        for _ in range(RING.calls.maxlen):  # whose records are of the groups that made the last calls
            dist.barrier()
        gc.collect()
        return len(gc.get_objects())

    counts = []
    for turn in range(KEPT + 101):
        if turn >= KEPT and (turn - KEPT) % 50 == 0:  # the communicators of so many groups are kept
            counts.append(objects())
        dist.destroy_process_group(dist.new_group(list(range(size))))
        torch_dist.destroy_process_group(torch_dist.new_group(list(range(size))))
    # Python's caches of abstract classes grow once. torch itself keeps an empty list a group (``_world.tags_to_pg``)
    assert min(counts[1] - counts[0], counts[2] - counts[1]) < 100
    dist.isend(torch.ones(1), (rank - 1) % size).wait()
    under_way.wait()


def test_works_are_forgotten_by_cxx(rank):
    import torch.distributed._functional_collectives as functional

    def alive():
        gc.collect()
        return sum(isinstance(each, (torch_dist.Work, torch.Tensor)) for each in gc.get_objects())

    before = alive()
    for _ in range(200):
        functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 0
    assert alive() - before < 10


def complex_calls(pg, size, op):
    """Return every way to a group by which torch combines complex numbers, each as a function that returns a result."""

    def number():
        return torch.full((size,), complex(1, 2))

    def of(name):
        kind = getattr(torch._C._distributed_c10d, name)()
        kind.reduceOp = op
        return kind

    def method(call, result):
        call().wait()
        return result

    one, whole, listed = torch.empty(1, dtype=torch.complex64), number(), number()
    lists = [list(listed.split(1))]
    reducing, scattering = of("AllreduceOptions"), of("ReduceScatterOptions")
    return {
        "allreduce": lambda: method(lambda: pg.allreduce([whole], reducing), whole),
        "allreduce with op": lambda: method(lambda: pg.allreduce(whole, op), whole),
        "several": lambda: method(lambda: pg.allreduce([whole, listed], reducing), whole),
        "allreduce_coalesced": lambda: method(
            lambda: pg.allreduce_coalesced([torch.ones(1), whole], of("AllreduceCoalescedOptions")), whole
        ),
        "reduce": lambda: method(lambda: pg.reduce([whole], of("ReduceOptions")), whole),
        "reduce with op": lambda: method(lambda: pg.reduce(whole, 0, op), whole),
        "reduce_scatter": lambda: method(lambda: pg.reduce_scatter([one], lists, scattering), one),
        "reduce_scatter_single": lambda: method(lambda: pg.reduce_scatter_single(one, listed, scattering), one),
        "_reduce_scatter_base": lambda: method(lambda: pg._reduce_scatter_base(one, listed, scattering), one),
        "torch all_reduce": lambda: torch_dist.all_reduce(whole, op, group=pg) or whole,
        "torch reduce": lambda: torch_dist.reduce(whole, 0, op, group=pg) or whole,
        "torch reduce_scatter": lambda: torch_dist.reduce_scatter(one, lists[0], op, group=pg) or one,
        "torch reduce_scatter_single": lambda: reduce_scatter_single(one, listed, op, group=pg) or one,
        "torch all_reduce_coalesced": lambda: torch_dist.all_reduce_coalesced([whole], op, group=pg) or whole,
        "functional": lambda: functional.all_reduce(whole, op.name.lower(), pg) + 0,
    }


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
reduce_scatter_single = getattr(torch_dist, "reduce_scatter_single", torch_dist.reduce_scatter_tensor)  # until 2.13


@pytest.mark.parametrize("call", complex_calls(None, 1, dist.ReduceOp.SUM))
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_product_of_complex_numbers_is_refused_as_torch_does(call, pg, rank, size):
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX):
        with pytest.raises((ValueError, RuntimeError), match=r"complex|op value"):  # 2.15 cannot say "max"
            complex_calls(pg, size, op)[call]()
    found = complex_calls(pg, size, dist.ReduceOp.SUM)[call]()  # the group goes on
    tensors = 2 if call == "several" else 1
    if rank == 0 or call not in ("reduce", "reduce with op", "torch reduce"):  # whose root it is
        assert found[0] == size * tensors * complex(1, 2)


def test_the_product_of_complex_numbers_by_our_names(pg, size):
    tensor = torch.full((2,), complex(1, 2))
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT, group=pg)
    torch.testing.assert_close(tensor, torch.full((2,), complex(1, 2) ** size))
    with CommDebugMode(), pytest.raises(ValueError, match="PRODUCT on complex"):  # goes through torch's operator
        dist.all_reduce(tensor, dist.ReduceOp.PRODUCT, group=pg)


@pytest.mark.skipif(TORCH < (2, 15), reason="torch wants a GPU for it until 2.15")
def test_torchs_split_group(rank, size):
    group = torch_dist.split_group(split_ranks=[[r] for r in range(size)])
    tensor = torch.full((2,), float(rank))
    torch_dist.all_reduce(tensor, group=group)
    assert (group.size(), tensor[0]) == (1, rank)
    torch_dist.destroy_process_group(group)


def test_what_a_group_cannot_do_it_says(world):
    with pytest.raises(RuntimeError, match="does not support merge_remote_group"):
        world.merge_remote_group(torch_dist.HashStore(), 2)
    assert (world.supports_window, world.supports_reconfigure) == (False, False)  # torch has them since 2.14
    for name in ("new_window", "reconfigure", "get_reconfigure_handle"):
        with pytest.raises(RuntimeError, match=f"does not support {name}: hpcdist"):
            getattr(world, name)()


def test_each_attribute_can_be_read(world):
    assert {name for name, _ in inspect.getmembers(world)} >= {*dir(torch_dist.ProcessGroup)}


def test_hooks_are_refused_and_not_forgotten(world):
    for register in (world.register_pre_hook, world.register_post_hook, world.register_abort_hook):
        with pytest.raises(RuntimeError, match="does not support hooks"):
            register(1, print)
    with pytest.raises(RuntimeError, match="does not support hooks"):
        world._register_on_completion_hook(print)


def test_a_graph_does_not_wait_for_calls_begun_outside(world):
    allow = functional.allow_inflight_collective_as_graph_input_ctx
    with pytest.raises(RuntimeError, match="wait_tensor does not wait for calls"), allow():
        pass
    with allow(False):
        pass


def test_pending_calls_can_be_waited_for(world, size):
    tensors = [torch.ones(4) for _ in range(10)]
    works = [world.allreduce([each], torch_dist.AllreduceOptions()) for each in tensors]
    world._wait_for_pending_works()
    assert all(work.is_completed() for work in works)
    assert [each.tolist() for each in tensors] == [[size] * 4] * 10


def test_the_store_of_a_group(world, rank, size):
    for group in (world, torch_dist.new_group(), dist.new_group()):
        store = group.get_group_store()
        store.set(f"of {rank}", group.group_name)
        assert store.get(f"of {(rank + 1) % size}").decode() == group.group_name
