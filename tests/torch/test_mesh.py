"""DeviceMesh: dimensions, names, slices; one MPI_Comm_split a dimension."""

import inspect

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh

import hpcdist as dist
from hpcdist.c10d.device_mesh import make_dimension
from tests.ranks import of_all_ranks


@pytest.fixture
def grid(size):
    """A mesh of two dimensions: 2 x n/2, or 1 x n."""
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))


def test_coordinates(grid, rank, size):
    assert type(grid) is dist.DeviceMesh is DeviceMesh
    columns = grid.size(1)
    assert grid.get_coordinate() == [rank // columns, rank % columns] or grid.get_coordinate() == (
        rank // columns,
        rank % columns,
    )
    assert grid.get_local_rank("rows") == rank // columns
    assert grid.get_local_rank("columns") == rank % columns
    assert grid.get_rank() == rank
    assert grid.shape == (size // columns, columns)
    assert grid.ndim == 2


def test_groups_communicate(grid, rank, size):
    columns = grid.size(1)
    for name, ranks in (
        ("rows", list(range(rank % columns, size, columns))),
        ("columns", list(range(rank - rank % columns, rank - rank % columns + columns))),
    ):
        group = grid.get_group(name)
        assert isinstance(group, dist.ProcessGroup)
        assert torch_dist.get_process_group_ranks(group) == ranks
        assert dist.get_process_group_ranks(group) == ranks
        mine = torch.tensor([float(rank)])
        dist.all_reduce(mine, group=group)
        assert mine.item() == sum(ranks)


@pytest.fixture
def splits(world, monkeypatch):
    """How many groups each split has made."""
    backend = dist.group.WORLD.any_backend()
    made = []
    original = type(backend).split

    def counted(self, subgroups, *args):
        made.append(len(subgroups))
        return original(self, subgroups, *args)

    monkeypatch.setattr(type(backend), "split", counted)
    return made


@pytest.mark.skipif(
    not hasattr(DeviceMesh, "_init_one_process_group"), reason="before 2.10 torch makes the groups of a mesh one by one"
)
def test_one_split_a_dimension(size, splits):
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    mesh = dist.init_device_mesh("cpu", shape)
    theirs = torch_dist.init_device_mesh("cpu", shape)
    assert splits == 2 * [size // each for each in shape if each != size]
    assert mesh.shape == theirs.shape


def test_groups_of_a_dimension_keep_the_order_asked_for(rank, size, splits):
    backwards = list(range(size))[::-1]
    group = make_dimension([backwards], "backwards", False)
    assert (group.rank(), dist.get_process_group_ranks(group)) == (size - 1 - rank, backwards)
    assert make_dimension([backwards], "forwards", True).rank() == rank
    assert splits == [1, 1]
    received = of_all_ranks(rank, group)
    assert received == backwards


@pytest.mark.skipif(
    "preserve_rank_order" not in inspect.signature(DeviceMesh.__init__).parameters, reason="of torch 2.15 and later"
)
def test_preserve_rank_order(rank, size, splits):
    backwards = list(range(size))[::-1]
    for keeps in (True, False):
        mesh = DeviceMesh("cpu", backwards, preserve_rank_order=keeps)
        expected = backwards if keeps else sorted(backwards)
        assert torch_dist.get_process_group_ranks(mesh.get_group()) == expected
        mine = torch.tensor([float(rank)])
        torch_dist.broadcast(mine, group=mesh.get_group(), group_src=0)
        assert mine.item() == expected[0]
    assert DeviceMesh("cpu", list(range(size)), preserve_rank_order=True).get_group() is dist.group.WORLD
    assert splits == [1] * (size > 1)
    if size % 2 == 0 and size > 2:
        rows = torch.tensor(backwards).view(2, -1)
        grid = DeviceMesh("cpu", rows, mesh_dim_names=("rows", "columns"), preserve_rank_order=True)
        row = next(each for each in rows.tolist() if rank in each)
        assert torch_dist.get_process_group_ranks(grid.get_group("columns")) == row
        assert splits == [1, size // 2, 2]


def test_slices_and_flattening(grid, size):
    assert grid["rows"].size() == grid.size(0)
    assert grid["columns"].get_group() is grid.get_group("columns")
    flat = grid._flatten("all")
    assert flat.size() == size
    assert grid["all"].get_group().size() == size


def test_from_a_group(rank, size):
    group = dist.new_group(list(range(size)))
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    assert mesh.get_group() is group
    assert mesh.get_local_rank() == rank


def test_a_mesh_of_some_ranks(rank, size):
    if size < 3:
        pytest.skip("leaves a rank out")
    mesh = dist.DeviceMesh("cpu", list(range(size - 1)))
    assert (mesh.get_coordinate() is None) == (rank == size - 1)


def test_names_that_do_not_fit(size):
    with pytest.raises(RuntimeError, match="mesh_shape and mesh_dim_names"):
        dist.init_device_mesh("cpu", (size,), mesh_dim_names=("one", "two"))
