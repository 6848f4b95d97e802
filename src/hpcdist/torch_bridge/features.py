"""Features of torch that differ among the releases that hpcdist supports.

Each is found by looking for it, never by torch's version number: a site's own build may have any number. "since" and
"until" name the first and the last release that has it; the documentation is written from them, and a test compares
them with the installed torch.

Two of the names are private: ``_C._distributed_c10d._current_process_group``, torch's own group of the current thread,
and ``device_mesh.DeviceMesh._init_one_process_group``, which makes the groups of a dimension.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch._C._distributed_c10d as bindings
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

__all__ = ["FEATURES", "Feature", "has"]


class Feature(NamedTuple):
    """A feature of torch that some supported releases lack."""

    is_there: bool  # whether this torch has it
    since: str | None  # the first release that has it, or None if all up to ``until`` do
    until: str | None  # the last release that has it, or None if the newest does
    consequence: str  # how hpcdist replaces it, or what users miss


def names_in(function: Any) -> tuple[str, ...]:
    """Return the names that a function's code uses, without its decorators."""
    return inspect.unwrap(function).__code__.co_names


def arguments(function: Any) -> tuple[str, ...]:
    """Return the names of a function's arguments; empty if this torch has no such function."""
    return tuple(inspect.signature(function).parameters) if function is not None else ()


MAKES_ONE = getattr(device_mesh.DeviceMesh, "_init_one_process_group", None)
LAYOUT = "torch.distributed._mesh_layout"
MESH_ARGUMENTS = ("sub_layout", "rank_map", "dim_name", "backend_override")

# read when this module is imported, before hpcdist replaces any of torch's functions
FEATURES = {
    "a current group in each thread": Feature(
        hasattr(bindings, "_current_process_group"), "2.9", None, "without it hpcdist keeps one for `hpcdist.dist2`"
    ),
    "`backend_override` of `init_device_mesh`": Feature(
        "backend_override" in arguments(device_mesh.init_device_mesh),
        "2.9",
        None,
        "without it TypeError if it is given",
    ),
    "`GroupName`": Feature(hasattr(c10d, "GroupName"), "2.10", None, "without it `hpcdist.GroupName` is `str`"),
    "groups of a mesh's dimension in one place": Feature(
        arguments(MAKES_ONE)[:4] == MESH_ARGUMENTS,
        "2.10",
        None,
        "with it one MPI_Comm_split makes all groups of a dimension; without it they are made one by one",
    ),
    "layouts of a mesh that nest": Feature(
        hasattr(getattr(import_module(LAYOUT), "_MeshLayout", None), "nest") if find_spec(LAYOUT) else False,
        "2.10",
        "2.12",
        "hpcdist asks for the ranks of a dimension in the way that fits",
    ),
    "`torch.distributed.debug`": Feature(
        find_spec("torch.distributed.debug") is not None, "2.10", None, "without it there is no `start_debug_server`"
    ),
    "`record_comm`": Feature(hasattr(dist, "record_comm"), "2.12", None, "without it hpcdist has one of its own"),
    "`all_gather_single` and the other names in `_single`": Feature(
        hasattr(dist.ProcessGroup, "all_gather_single"),
        "2.13",
        None,
        "without them C++ calls a group's methods by their earlier names; `hpcdist` has both",
    ),
    "`batch_isend_irecv` only for its own class": Feature(
        "type" in names_in(c10d.batch_isend_irecv),
        None,
        "2.13",
        "hpcdist launches its groups' messages together: on NCCL they would wait for each other",
    ),
    "`monitored_barrier` only for gloo": Feature(
        "GLOO" in names_in(c10d.monitored_barrier), None, "2.13", "hpcdist lets it take its groups"
    ),
    "`split_group` in the order given": Feature(
        "NON_GROUP_MEMBER" in names_in(c10d.split_group),
        "2.14",
        None,
        "with it `split_group` numbers ranks in the order given, and other ranks get `NON_GROUP_MEMBER` of it, and of "
        "`new_group` with `use_local_synchronization`; without it in ascending order, and None",
    ),
    "a flight recorder attached to each group": Feature(
        hasattr(c10d, "_maybe_attach_flight_recorder"),
        "2.15",
        None,
        "hpcdist keeps it away from its groups, where it raises, and records them itself",
    ),
}


def has(name: str) -> bool:
    """Tell whether this torch has one of ``FEATURES``."""
    return FEATURES[name].is_there
