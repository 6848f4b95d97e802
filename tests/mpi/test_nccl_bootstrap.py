"""Every rank receives the one unique id, made by the real libnccl and sent over MPI and over a TCPStore."""

from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

import hpcdist as dist
from hpcdist.backends.nccl import bootstrap as finding
from hpcdist.backends.nccl.library import load
from hpcdist.core.errors import DistBackendError
from hpcdist.launch import devices

LIMIT = timedelta(seconds=20)


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("nccl.core", reason="nccl4py is not installed (pip install 'hpcdist[nccl-cu12]')")
    return load()


@pytest.fixture
def comm(world):
    if world.cpu is None or world.cpu.name != "mpi":
        pytest.skip("the default group is not carried by MPI")
    return world.cpu.comm


@pytest.fixture
def store(comm, rank, size):
    """A TCPStore of torch's on a free port that rank 0 tells over MPI."""
    made = TCPStore("127.0.0.1", 0, size, True, LIMIT, wait_for_workers=False) if rank == 0 else None
    port = comm.bcast(made.port if made else None)
    yield made or TCPStore("127.0.0.1", port, size, False, LIMIT)
    comm.Barrier()  # the server ends with rank 0's object


def check_same(comm, ids, count=1):
    mine = [bytes(each) for each in ids]
    everyones = comm.allgather(mine)
    assert len(mine) == count
    assert all(len(each) == 128 and any(each) for each in mine)
    assert len(set(mine)) == count
    assert all(each == mine for each in everyones)
    return mine


def test_a_real_id_over_mpi_keeps_its_place_among_queued_calls(library, comm, world, rank, size):
    tensors = [torch.full((1000,), float(rank)) for _ in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    first, second = (
        check_same(comm, finding.unique_ids(library, finding.PeerChannel(world.cpu), rank, size)) for _ in range(2)
    )
    assert first != second
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert tensor[0].item() == sum(range(size))


def test_a_real_id_over_a_store_takes_one_key(library, comm, store, rank, size):
    channel = finding.StoreChannel(PrefixStore("nccl", store), rank)
    comm.Barrier()
    before = store.num_keys()
    comm.Barrier()
    ids = check_same(comm, finding.unique_ids(library, channel, rank, size))
    comm.Barrier()
    assert store.num_keys() == before + 1
    assert store.get("nccl/id/0").decode() == ids[0].hex()


def test_a_real_id_over_a_store_of_ours(library, comm, rank, size):
    import hpcdist_stores as stores

    if rank == 0:
        made = stores.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
        comm.bcast(made.port)
    else:
        made = stores.TCPStore("127.0.0.1", comm.bcast(None), None, False, LIMIT, wait_for_workers=False)
    check_same(comm, finding.unique_ids(library, finding.StoreChannel(PrefixStore("nccl", made), rank), rank, size))
    comm.Barrier()


def test_several_roots_each_make_one(library, comm, world, store, rank, size, monkeypatch):
    monkeypatch.setattr(finding, "RANKS_PER_ROOT", 1)  # as many roots as 128 times the ranks would have
    over_mpi = finding.PeerChannel(world.cpu)
    over_store = finding.StoreChannel(PrefixStore("many", store), rank)
    check_same(comm, finding.unique_ids(library, over_mpi, rank, size), size)
    check_same(comm, finding.unique_ids(library, over_store, rank, size), size)


@pytest.mark.parametrize("way", ["mpi", "store"])
def test_an_id_for_two_ranks_alone(two_ranks, library, comm, world, store, rank, size, way):
    channel = finding.PeerChannel(world.cpu) if way == "mpi" else finding.StoreChannel(PrefixStore("p", store), rank)
    pairs = [(low, high) for low in range(size) for high in range(low + 1, size)]
    mine = {pair: bytes(finding.pair_id(library, channel, rank, sum(pair) - rank)) for pair in pairs if rank in pair}
    heard = comm.allgather(mine)
    for low, high in pairs:
        assert heard[low][low, high] == heard[high][low, high]
        assert any(heard[low][low, high])
    assert len({each for ids in heard for each in ids.values()}) == len(pairs)


def test_a_subgroup_has_an_id_of_its_own(two_ranks, library, comm, world, rank, size):
    half, _ = dist.new_subgroups_by_enumeration([list(range(size // 2)), list(range(size // 2, size))])
    ids = finding.unique_ids(library, finding.PeerChannel(half.cpu), half.rank(), half.size())
    heard = comm.allgather(bytes(ids[0]))
    assert len(set(heard)) == 2
    assert len(set(heard[: size // 2])) == 1
    dist.destroy_process_group(half)


def test_a_subgroup_without_mpi_of_its_own_is_told_over_the_parents(library, comm, world, rank, size, monkeypatch):
    members = list(range(0, size, 2))
    if rank in members:
        channel = finding.PeerChannel(world.cpu, members)
        first = bytes(finding.unique_ids(library, channel, members.index(rank), len(members))[0])
        monkeypatch.setattr(finding, "RANKS_PER_ROOT", 1)
        many = [bytes(each) for each in finding.unique_ids(library, channel, members.index(rank), len(members))]
    else:
        first, many = b"", []
    heard = comm.allgather((first, many))
    assert len({heard[member][0] for member in members}) == 1
    assert all(heard[member][1] == heard[0][1] for member in members)
    assert len(set(heard[0][1])) == len(members)


def test_two_ranks_on_one_gpu_fail_on_all_ranks(comm, world, rank, size, monkeypatch):
    monkeypatch.delenv(devices.SHARE, raising=False)
    monkeypatch.setattr(devices, "identity", lambda device: f"GPU-{min(rank, size - 2)}")  # the last two share one
    device = torch.device("cuda", 0)
    if size < 2:
        finding.check_devices(world.cpu, device, (2, 30, 0))
        return
    with pytest.raises(DistBackendError, match=rf"ranks \[{size - 2}, {size - 1}\] of the group use one GPU"):
        finding.check_devices(world.cpu, device, (2, 30, 0))
    monkeypatch.setenv(devices.SHARE, "1")
    finding.check_devices(world.cpu, device, (2, 30, 0))


def test_the_ranks_of_a_node_are_counted_by_shared_memory(comm, rank, size, monkeypatch):
    everything = tuple(f"GPU-{index}" for index in range(size))
    monkeypatch.setattr(devices, "visible_gpus", lambda: everything)
    views, local_rank = devices.views_by_mpi(comm)
    assert len(views) == size  # these tests run on one machine
    assert comm.allgather(devices.place(views, local_rank)) == list(range(size))


def test_without_a_gpu_the_real_library_fails_on_every_rank_and_none_waits(library, comm, world, rank, size):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ids = finding.unique_ids(library, finding.PeerChannel(world.cpu), rank, size)
    with pytest.raises(library.failures):
        library.core.Communicator.init(size, rank, ids)
    comm.Barrier()


def test_the_default_group_without_a_gpu_is_unchanged(world):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "cuda:nccl" not in dist.get_backend_config().split(",")
