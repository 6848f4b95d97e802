"""DeviceMesh: dimensions, names, slices; one MPI_Comm_split a dimension."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh

import hpcdist as dist


@pytest.fixture
def grid(size):
    """A mesh of two dimensions: 2 x n/2, or 1 x n."""
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))


def test_the_class_is_torchs(grid):
    assert dist.DeviceMesh is DeviceMesh
    assert isinstance(grid, DeviceMesh)


def test_coordinates(grid, rank, size):
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


def test_one_split_a_dimension(size, monkeypatch):
    backend = dist.group.WORLD.any_backend()
    splits = []
    original = type(backend).split

    def counted(self, subgroups, *args):
        splits.append(len(subgroups))
        return original(self, subgroups, *args)

    monkeypatch.setattr(type(backend), "split", counted)
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    mesh = dist.init_device_mesh("cpu", shape)
    theirs = torch_dist.init_device_mesh("cpu", shape)
    assert splits == 2 * [size // each for each in shape if each != size]
    assert mesh.shape == theirs.shape


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
