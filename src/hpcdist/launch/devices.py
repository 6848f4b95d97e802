"""Choice of this rank's GPU, by its position among the ranks of the node that see the same GPUs.

If the launcher binds GPUs to tasks (Slurm's ``--gpus-per-task``, ``--gpu-bind``), every rank sees its own and takes the
first. If all ranks of a node see all GPUs, the rank on the node decides. ``rank % count`` would be wrong if ranks are
not assigned to nodes in blocks, or if nodes differ: then two ranks would have one GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpcdist.core.errors import DistBackendError
from hpcdist.launch import environment

SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own: several ranks may use one GPU
SHARE_SINCE = (2, 30)

View = tuple[str, ...]  # the identities of the GPUs that a process sees, in order


def may_share(given: Mapping[str, str] = os.environ) -> bool:
    return given.get(SHARE, "0").strip() not in ("", "0")


def how_to_share(version: Sequence[int]) -> str:
    """Return the advice for several ranks on one GPU, for a release of NCCL."""
    if tuple(version) >= SHARE_SINCE:
        return f"set {SHARE}=1"
    return (
        f"take NCCL {'.'.join(map(str, SHARE_SINCE))} or later and set {SHARE}=1, which this one "
        f"({'.'.join(map(str, version))}) does not know"
    )


def identity(device: torch.device) -> str:
    """Return a GPU's UUID."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_gpus() -> View:
    """Return the GPUs that this process sees; a single one without its UUID, whose query would start CUDA."""
    count = torch.cuda.device_count()
    if count < 2:
        return ("the only one",) * count
    return tuple(identity(torch.device("cuda", index)) for index in range(count))


def place(views: Sequence[View], local_rank: int, shares: bool = False) -> int:
    """Return the index of a rank's GPU among those that it sees, given the GPUs that each rank of the node sees.

    With ``shares`` several ranks may use one GPU; neighbouring ranks share. DistBackendError if this rank sees no GPU,
    or there are more ranks than GPUs that they see.
    """
    mine = views[local_rank]
    if not mine:
        raise DistBackendError("this process sees no GPU")
    if len(mine) == 1:
        return 0  # the connection finds whether another rank uses it too
    alike = [rank for rank, view in enumerate(views) if view == mine]
    position = alike.index(local_rank)
    if len(alike) <= len(mine):
        return position
    if shares:
        return position * len(mine) // len(alike)
    raise DistBackendError(
        f"{len(alike)} ranks of this node see the same {len(mine)} GPUs, and NCCL wants one a rank: start "
        f"{len(mine)} ranks a node, or set {SHARE}=1 to let ranks share them, which NCCL knows from "
        f"{'.'.join(map(str, SHARE_SINCE))} on"
    )


def views_by_mpi(comm: Any) -> tuple[list[View], int]:
    """Return the GPUs that each rank of this node sees, and this rank's index on it; every rank of ``comm`` calls.

    The ranks of a node are those that share memory according to MPI (MPI_COMM_TYPE_SHARED, MPI 7.4.2).
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    try:
        return node.allgather(visible_gpus()), node.Get_rank()
    finally:
        node.Free()


def views_by_launcher(environ: Mapping[str, str] = os.environ) -> tuple[list[View], int]:
    """Return the same without MPI, by the launcher's variables for the rank on the node; raise if there are none."""
    mine, local_rank = visible_gpus(), environment.node_local_rank(environ)
    if len(mine) == 1:
        return [mine], 0
    if local_rank is None:
        raise DistBackendError(
            f"this process sees {len(mine)} GPUs, and no launcher says which rank of the node it is (looked at "
            f"{', '.join(environment.LOCAL_RANKS)}): pass device_id=, or call torch.cuda.set_device"
        )
    if environ.get("SLURM_GPUS_PER_TASK"):  # Slurm's binding: the GPUs seen are this task's own
        return [mine], 0
    local_size = environment.integer(environ, "LOCAL_WORLD_SIZE")  # torchrun's
    return [mine] * max(local_rank + 1, local_size or 0), local_rank


def choose_gpu(comm: Any = None) -> torch.device:
    """Return this process's GPU; with ``comm``, every rank of it calls."""
    views, local_rank = views_by_mpi(comm) if comm is not None else views_by_launcher()
    return torch.device("cuda", place(views, local_rank, may_share()))
