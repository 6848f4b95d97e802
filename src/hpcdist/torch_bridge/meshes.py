"""DeviceMesh on our groups: all groups of a dimension are made in one step.

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``device_mesh.DeviceMesh._init_one_process_group``    one MPI_Comm_split a dimension, for all its groups  2.10.0, 2.15.0
``distributed_c10d._world`` (default_pg)              whether the default group is ours                   2.10.0, 2.15.0
``_mesh_layout._MeshLayout``                          which ranks the groups of that dimension have       2.10.0, 2.15.0
====================================================  ==================================================  ==============
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from hpcdist.core.world import WORLD
from hpcdist.torch_bridge.features import has


def split_meshes_by(make: Callable[[list[list[int]], str, bool], Any]) -> None:
    """Let DeviceMesh make all groups of a dimension in one step if the default group is ours.

    ``make`` makes disjoint groups of global ranks, with a description, in ascending order or not; it returns this
    rank's or None.
    """
    if not has("groups of a mesh's dimension in one place"):
        return  # torch's own loop over new_group makes the same groups, one by one
    from torch.distributed._mesh_layout import _MeshLayout

    stock = device_mesh.DeviceMesh._init_one_process_group

    def init_one(sub_layout: Any, rank_map: torch.Tensor, dim_name: str, backend_override: Any, *keeps: bool) -> Any:
        default: Any = WORLD.default
        if default is None or c10d._world.default_pg is not default or tuple(backend_override) != (None, None):
            return stock(sub_layout, rank_map, dim_name, backend_override, *keeps)
        nested = sub_layout.nest() if has("layouts of a mesh that nest") else _MeshLayout([sub_layout])
        ranks = nested.remap_to_tensor(rank_map).tolist()
        if sub_layout.numel() == dist.get_world_size() and (not any(keeps) or ranks[0] == sorted(ranks[0])):
            return stock(sub_layout, rank_map, dim_name, backend_override, *keeps)  # the default group itself
        mine = make(ranks, f"mesh_{dim_name}", not any(keeps))
        return mine.group_name if mine is not None else None

    setattr(device_mesh.DeviceMesh, "_init_one_process_group", staticmethod(init_one))  # noqa: B010  # for mypy
