"""Device meshes: ranks laid out in several dimensions.

``DeviceMesh`` is torch's class, so that DTensor, FSDP2, tensor parallel and DCP accept a mesh of the facade. On our
groups each of its dimensions is one MPI_Comm_split (``hpcdist.torch_bridge``), also if torch's libraries make the mesh.
"""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

from hpcdist.c10d.groups import make
from hpcdist.c10d.lifecycle import init_process_group
from hpcdist.core.factory import check_ranks
from hpcdist.core.world import WORLD, default_group
from hpcdist.torch_bridge import mirror, replaced

__all__ = ["DeviceMesh", "init_device_mesh"]


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: Any = None,
) -> DeviceMesh:
    """Arrange the ranks of the default group in several dimensions; every rank calls this.

    Makes the default group first if there is none.

    Args:
        device_type: that of the tensors, ``"cpu"`` or ``"cuda"``, without an index.
        mesh_shape: the number of ranks in each dimension; ranks are numbered in row-major order.
        mesh_dim_names: a name for each dimension, for slices: ``mesh["tp"]``.
        backend_override: as in c10d: another backend or options for some dimensions.

    Returns:
        The mesh (``torch.distributed.device_mesh.DeviceMesh``).

    Raises:
        RuntimeError: wrong names, a mesh larger than the world, or a default group that torch does not know.
    """
    if WORLD.default is None and not torch.distributed.is_initialized():
        init_process_group()
    if WORLD.default is not None and not mirror.is_shown(WORLD.default):
        raise RuntimeError(
            "init_device_mesh: this default group is not torch.distributed's, whose DeviceMesh looks for ranks there; "
            "call init_process_group with bridge=True, without HPCDIST_BRIDGE=0 and before any other "
            "torch.distributed.init_process_group"
        )
    override = {} if backend_override is None else {"backend_override": backend_override}  # not every torch has it
    return torch_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names, **override)


def make_dimension(ranks_per_subgroup: list[list[int]], description: str, is_sorted: bool) -> Any:
    """Make the groups of one dimension in one step and return this rank's, or None.

    Unless ``is_sorted`` the ranks of each are numbered in the order given (``preserve_rank_order``, since torch 2.15).
    """
    default = default_group()
    subgroups = [check_ranks(ranks, is_sorted, default.size()) for ranks in ranks_per_subgroup]
    return make(default, subgroups, None, None, None, description, None)


replaced.split_meshes_by(make_dimension)
