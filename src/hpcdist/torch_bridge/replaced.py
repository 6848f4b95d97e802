"""Functions of torch that are replaced when hpcdist is imported, each with its reason.

A replacement gets torch's own function as its first argument, and calls it for groups that are not ours.

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``distributed_c10d._world`` (default_pg)              the group that is meant                             2.13.0, 2.15.0
``distributed_c10d._set_pg_timeout``                  sets gloo's and NCCL's limits only                  2.13.0
``distributed_c10d.monitored_barrier``                refuses what is not named "gloo"                    2.8.0, 2.13.0
``distributed_c10d._process_group_name``              the name of a group that only its members make      2.13.0, 2.14.1
``distributed_c10d._get_split_source``                hands C++ a backend made in Python                  2.13.0, 2.14.1
``distributed_c10d._maybe_attach_flight_recorder``    raises for a group made in Python                   2.15.0
``distributed_c10d.batch_isend_irecv``                launches a message at a time on a group made in     2.8.0, 2.13.0
                                                      Python: on NCCL they wait for each other
``distributed_c10d._coalescing_manager``              an error inside leaves it open: it holds back the   2.11.0, 2.13.0
                                                      next calls of the group
``distributed_c10d._update_default_pg``               tells that torch has forgotten an aborted world     2.13.0, 2.14.1
``distributed_c10d.destroy_process_group``            keeps all groups if one of them raises              2.13.0
``_C._distributed_c10d.                               a group made in Python registers no Work that        2.13.0
_set_allow_inflight_collective_as_graph_input``       ``wait_tensor`` could wait for
``_C._distributed_c10d._register_work``,              a Work has a C++ half only from when C++ is to      2.11.0, 2.13.0
``Reducer._set_forward_pass_work_handle``             hold it
``DistributedDataParallel.                            its FP16_COMPRESS takes a list of tensors made in   2.13.0
_register_builtin_comm_hook``                         C++ only, and fails on what Python hands on
``device_mesh.DeviceMesh._init_one_process_group``,   one MPI_Comm_split a dimension of a DeviceMesh,     2.10.0, 2.15.0
``_mesh_layout._MeshLayout``                          for all its groups
====================================================  ==================================================  ==============

Others are replaced in the modules that need it: ``_new_process_group_helper`` (``registration``; in a program that has
not imported hpcdist ``hpcdist.autoload``), ``start_debug_server`` (``hpcdist.c10d.debug_server``), and under
``hpcdist run`` ``rendezvous`` and ``is_mpi_available`` (``registration``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as bindings
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.work import Work
from hpcdist.core.world import WORLD
from hpcdist.torch_bridge.features import has
from hpcdist.torch_bridge.mirror import forget_coalescing

Function = Callable[..., Any]
AFTER_ABORT: list[Callable[[], None]] = []  # ends our world in a job whose default group is torch's own


def replace(name: str, function: Function, *owners: Any) -> None:
    """Replace torch's function in the modules that have it, if this torch does; the replacement gets torch's."""
    if (stock := getattr(owners[0], name, None)) is None:
        return

    @wraps(stock)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    for owner in owners:
        setattr(owner, name, replaced)


def member_group(group: Any) -> Any:
    return c10d._world.default_pg if group is None else group


def batch_isend_irecv(stock: Function, p2p_op_list: Any) -> Any:
    """Launch messages together if the group is ours."""
    group = member_group(getattr(p2p_op_list[0], "group", None)) if p2p_op_list else None
    with group.grouped() if isinstance(group, ProcessGroup) else nullcontext():
        return stock(p2p_op_list)


@contextmanager
def coalescing_manager(stock: Function, group: Any = None, *args: Any, **named: Any) -> Iterator[Any]:
    """Drop the calls that are held back on a group of ours if an error leaves torch's manager."""
    with stock(group, *args, **named) as manager:
        try:
            yield manager
        except BaseException as error:
            if isinstance(pg := member_group(group), ProcessGroup):
                pg._leave_coalescing(error)
                forget_coalescing(pg)
            raise


def monitored_barrier(stock: Function, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    pg = member_group(group)
    if isinstance(pg, ProcessGroup):
        return pg.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]  # c10d.monitored adds it
    return stock(group, timeout, wait_all_ranks)


def set_timeout(stock: Function, timeout: Any, group: Any = None) -> None:
    """Set the limit of a group of ours; that of 2.13 sets only gloo's and NCCL's."""
    pg = member_group(group)
    if isinstance(pg, ProcessGroup):
        pg.set_timeout(timeout)
    else:
        stock(timeout, group)


def attach_recorder(stock: Function, pg: Any, *args: Any) -> None:
    """Skip groups of ours, for which torch's recorder would raise: ``watch`` records them."""
    if not isinstance(pg, ProcessGroup):
        stock(pg, *args)


def local_name(stock: Function, ranks: Any, use_hashed_name: bool) -> Any:
    """Name a group that only its members make by its ranks, while its world is ours.

    torch's name contains the process's number of groups, and torch 2.14 counts this one for the names of groups that
    all make too: on members that are in different numbers of groups the names would differ.
    """
    default: Any = c10d._world.default_pg
    is_ours = use_hashed_name and isinstance(default, ProcessGroup)
    return default.next_name(ranks) if is_ours else stock(ranks, use_hashed_name)


def split_source(stock: Function, pg: Any) -> Any:
    """Give C++ no backend of a default group of ours, bound to a GPU, from which it would split new groups.

    C++ can split only its own backends, and only the members make our groups.
    """
    return None if isinstance(pg, ProcessGroup) else stock(pg)


def update_default(stock: Function, pg: Any) -> None:
    """Remove a world of ours that torch has aborted and removed: its groups know only that each of them was aborted.

    torch's destroy ends the default group by ``shutdown``, which removes it.
    """
    stock(pg)
    default = WORLD.default
    if pg is None and WORLD.mirror is None:
        for end in AFTER_ABORT:
            end()
    elif pg is None and isinstance(default, ProcessGroup) and default.is_aborted():
        WORLD.clear()


def destroy(stock: Function, group: Any = None) -> None:
    """End and remove the other groups too if one of ours raises at its end, as hpcdist's own function does."""
    before = live()
    try:
        stock(group)
    except Exception:
        if live() < before:
            with suppress(Exception):  # the first error is raised
                destroy(stock, group)
        raise


def live() -> int:
    """Return the number of groups of ours that torch knows and that have not ended."""
    return sum(isinstance(each, ProcessGroup) and not each.is_aborted() for each in c10d._world.pg_map)


def allow_in_flight(stock: Function, value: bool = True) -> None:
    """Refuse a compiled graph that waits for calls of ours begun outside: it would not find them.

    C++ registers the Works of its own groups for ``wait_tensor``, and removes those with another wait.
    """
    if value and isinstance(member_group(None), ProcessGroup):
        raise RuntimeError(
            "allow_inflight_collective_as_graph_input_ctx: wait_tensor does not wait for calls of torch.distributed on "
            "groups of hpcdist; wait for the Work before the compiled function, or begin the call inside it"
        )
    stock(value)


def hold_work(stock: Function, *args: Any, **named: Any) -> Any:
    """Pass C++ a Work of ours with its C++ half."""
    for each in (*args, *named.values()):
        if isinstance(each, Work):
            each._for_cpp()
    return stock(*args, **named)


def register_hook(stock: Function, model: DistributedDataParallel, kind: Any) -> None:
    """Register the compression that DDP has in Python in place of the one in C++, if the group is ours."""
    is_half = kind == dist.BuiltinCommHookType.FP16_COMPRESS  # type: ignore[attr-defined]  # the stubs leave it out
    if is_half and isinstance(model.process_group, ProcessGroup):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(model.process_group, fp16_compress_hook)
    else:
        stock(model, kind)


def replace_all() -> None:
    """Replace the functions that this torch has; called once in a process."""
    if has("`batch_isend_irecv` only for its own class"):
        replace("batch_isend_irecv", batch_isend_irecv, c10d, dist)
    replace("_coalescing_manager", coalescing_manager, c10d, dist)
    if has("`monitored_barrier` only for gloo"):
        replace("monitored_barrier", monitored_barrier, c10d, dist)
    if has("a flight recorder attached to each group"):
        replace("_maybe_attach_flight_recorder", attach_recorder, c10d)
    replace("_set_pg_timeout", set_timeout, c10d)
    replace("_process_group_name", local_name, c10d)
    replace("_get_split_source", split_source, c10d)
    replace("_update_default_pg", update_default, c10d)
    replace("destroy_process_group", destroy, c10d, dist)
    replace("_set_allow_inflight_collective_as_graph_input", allow_in_flight, bindings)
    replace("_register_work", hold_work, bindings)
    replace("_set_forward_pass_work_handle", hold_work, bindings.Reducer)
    replace("_register_builtin_comm_hook", register_hook, DistributedDataParallel)


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
