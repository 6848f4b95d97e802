"""Node-shared tensors: one copy, seen by all ranks of a node and their children, and freed by each for itself."""

import gc
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hpcdist as dist
from hpcdist.core import memory_file
from tests.mpi.conftest import BACKEND
from tests.ranks import of_all_ranks

from .refused import freed


@pytest.fixture
def peers(world):
    """The ranks of this rank's node."""
    places = of_all_ranks((os.uname().nodename, memory_file.device_id()))
    return [rank for rank, place in enumerate(places) if place == places[dist.get_rank()]]


def mappings():
    """Proportional and resident bytes of this process's mappings of shared tensors."""
    pss = rss = 0
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if "/dev/shm/hpcdist-" in part:
            pss += 1024 * int(re.search(r"(?m)^Pss: +(\d+)", part)[1])
            rss += 1024 * int(re.search(r"(?m)^Rss: +(\d+)", part)[1])
    return pss, rss


def test_all_ranks_of_a_node_see_what_one_writes(peers, rank, size):
    tensor = dist.node_shared((len(peers), 3), torch.int64, fill=7)
    assert tensor.shape == (len(peers), 3)
    assert tensor.dtype == torch.int64
    assert bool((tensor == 7).all())
    dist.barrier()
    tensor[peers.index(rank)] = rank
    dist.barrier()
    assert tensor[:, 0].tolist() == peers
    dist.barrier()
    dist.all_reduce(own := tensor[peers.index(rank)].clone())
    assert own.tolist() == [size * (size - 1) // 2] * 3


SHAPES = [5, (), (0,), (2, 0), (3, 4), torch.Size([2, 3]), [1, 2], np.array([2, 3]), np.array(5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(world, shape):
    tensor = dist.node_shared(shape, torch.float64)
    assert tensor.shape == torch.Size(np.atleast_1d(np.array(shape, int)))
    assert not tensor.any()
    assert tensor.is_contiguous()
    assert tensor.is_shared()


def written_by_lowest(peers, rank):
    def fill(tensor):
        assert rank == peers[0]
        torch.arange(tensor.numel(), out=tensor.view(-1))

    return fill


@pytest.mark.parametrize("kind", ["none", "number", "complex", "bool", "tensor", "strided", "array", "function"])
def test_fills(peers, rank, kind):
    values = torch.arange(6.0).view(2, 3)
    fills = {
        "none": (None, torch.float32, torch.zeros(2, 3)),
        "number": (2.5, torch.float32, torch.full((2, 3), 2.5)),
        "complex": (1 + 2j, torch.complex64, torch.full((2, 3), 1 + 2j)),
        "bool": (True, torch.bool, torch.ones(2, 3, dtype=torch.bool)),
        "tensor": (values, torch.bfloat16, values.bfloat16()),
        "strided": (torch.arange(6.0).view(3, 2).t(), torch.float32, torch.arange(6.0).view(3, 2).t()),
        "array": (values.numpy(), torch.float32, values),
        "function": (written_by_lowest(peers, rank), torch.float32, values),
    }
    fill, dtype, want = fills[kind]
    got = dist.node_shared((2, 3), dtype, fill=fill if rank == peers[0] else np.zeros(1))  # theirs is not looked at
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (((2, -1),), ValueError, "no negative size"),
        (("12",), TypeError, "`shape` is .12. of type str; expected an int"),
        ((("a",),), TypeError, "rank 0 of the group: TypeError"),
        (((2,), float), TypeError, "`dtype` is of type type; expected a torch.dtype"),
        (((2,), torch.float32, None, "zeros"), TypeError, "Expected parameter `fill` of type torch.Tensor"),
        (((2,), torch.float32, None, torch.zeros(3)), ValueError, r"`fill` has shape \(3,\); expected .* \(2,\)"),
        (((2,), torch.float32, None, freed(2)), ValueError, "storage was freed"),
        (((1 << 60,),), dist.DistBackendError, "/dev/shm of host .* bytes free, and 4611686018427387904 are needed"),
    ],
)
def test_bad_arguments(world, arguments, error, text):
    with pytest.raises(error, match=text):
        dist.node_shared(*arguments)
    assert len(set(of_all_ranks("still in step"))) == 1


def test_what_is_wrong_on_one_rank_is_raised_on_all(peers, rank, size):
    last = size - 1
    with pytest.raises(ValueError, match=f"failed on rank {last} of the group: ValueError: `shape` is"):
        dist.node_shared((-1 if rank == last else 1,))
    if size > 1:
        with pytest.raises(ValueError, match=r"rank 0 of the group for torch.float32 of shape \(3,\), rank"):
            dist.node_shared((3 if rank == 0 else 4,))

    def failing(tensor):
        raise OSError(5, "no such data")

    with pytest.raises(dist.DistBackendError, match=r"on rank 0 of the group: OSError: .*no such data") as caught:
        dist.node_shared((3,), fill=failing)
    assert isinstance(caught.value.__cause__, OSError) is (rank == peers[0])
    with pytest.raises(SystemExit if rank == peers[0] else dist.DistBackendError, match=r"3$"):
        dist.node_shared((3,), fill=lambda tensor: sys.exit(3))
    assert dist.node_shared((3,), fill=1).tolist() == [1] * 3


def test_a_full_folder_is_the_same_error_on_all_ranks(peers, rank, monkeypatch):
    """If the room goes between the look and the allocation."""

    def full(descriptor, nbytes):
        raise OSError(28, "No space left on device")

    if rank == 0:
        monkeypatch.setattr(memory_file, "reserve", full)
    with pytest.raises(dist.DistBackendError, match=r"on rank 0 .* bytes free, and 12 are needed") as caught:
        dist.node_shared((3,))
    assert len(set(of_all_ranks(str(caught.value)))) == 1


def test_no_name_and_no_memory_stay(world, rank, memory_files):
    gc.collect()  # earlier tests' tensors
    before = mappings()
    tensor = dist.node_shared((1 << 20,))
    view = tensor[5:7]
    assert not any(path.exists() for path in memory_files)
    view.fill_(3)
    del tensor
    assert view.tolist() == [3, 3]
    del view
    gc.collect()
    assert mappings() == before


def test_one_rank_may_drop_its_tensor_while_others_go_on(peers, rank, size):
    tensor = dist.node_shared((4,), fill=1)
    if rank == peers[0]:
        del tensor
        gc.collect()
    dist.barrier()
    if rank != peers[0]:
        tensor += 0
        assert tensor.tolist() == [1] * 4
    dist.barrier()


def test_one_copy_a_node(peers, rank):
    nbytes = 32 << 20
    gc.collect()  # earlier tests' tensors
    dist.barrier()
    earlier, _ = mappings()
    dist.barrier()
    tensor = dist.node_shared((nbytes // 8,), torch.int64, fill=1)
    assert int(tensor.sum()) == nbytes // 8  # read by all
    dist.barrier()
    pss, rss = mappings()
    dist.barrier()
    assert rss >= nbytes
    pss -= earlier
    together = sum(of_all_ranks(pss)[peer] for peer in peers)
    assert 0.99 * nbytes < together < 1.01 * nbytes  # the kernel rounds down by page and rank


class Rows(Dataset):
    """Samples of a shared tensor, which also note in it that they were read."""

    def __init__(self, data, read):
        self.data, self.read = data, read

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.read[index] += 1
        return self.data[index]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_have_the_same_memory(peers, rank, start):
    if start == "spawn" and dist.get_world_size() > 1:
        pytest.skip("Python starts again in each worker of each rank: 6 s a rank")
    data = dist.node_shared((8, 2), fill=lambda tensor: tensor.copy_(torch.arange(16.0).view(8, 2)))
    read = dist.node_shared((len(peers), 8), torch.int32)
    mine = read[peers.index(rank)]
    loader = DataLoader(Rows(data, mine), batch_size=4, num_workers=1, multiprocessing_context=start)
    assert torch.equal(torch.cat(list(loader)), data)
    dist.barrier()
    assert bool((read == 1).all())  # written by the workers of all ranks
    dist.barrier()


def test_groups(world, rank, size):
    alone = [dist.new_group([each]) for each in range(size)][rank]
    tensor = dist.node_shared((2,), group=alone, fill=rank)
    dist.barrier()
    assert tensor.tolist() == [rank] * 2
    dist.destroy_process_group(alone)
    assert tensor.tolist() == [rank] * 2
    with pytest.raises(ValueError, match="not a live group"):
        dist.node_shared((2,), group=alone)
    with pytest.warns(UserWarning, match="does not belong to the given group"):
        assert dist.node_shared((2,), group=dist.GroupMember.NON_GROUP_MEMBER) is None


def test_several_nodes_have_copies_of_their_own(two_nodes, rank):
    """Imitated on one machine; ``tests/cluster`` has real ones."""
    tensor = dist.node_shared((1,), torch.int64, fill=lambda tensor: tensor.fill_(rank))
    assert tensor.tolist() == [rank % 2]
    dist.barrier()


def test_it_outlives_the_group_over_cycles_of_init_and_destroy(peers, rank, size):
    kept = []
    for cycle in range(3):
        tensor = dist.node_shared((len(peers),), fill=-1.0)
        dist.barrier()
        tensor[peers.index(rank)] = cycle
        dist.barrier()
        assert tensor.tolist() == [cycle] * len(peers)
        dist.barrier()  # all have looked
        kept.append(tensor)
        dist.destroy_process_group()
        own = tensor[peers.index(rank)]
        own += 1
        assert own == cycle + 1
        dist.init_process_group(BACKEND)
    assert [tensor[peers.index(rank)].item() for tensor in kept] == [1, 2, 3]
