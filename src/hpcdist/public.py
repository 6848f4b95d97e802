"""Public names of ``hpcdist``; importing them shows our groups to torch and to its compiler."""

import hpcdist.core.requirements  # noqa: I001  # first: it says what the other imports would lack

from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GatherOptions,
    QueueEmptyError,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    default_pg_timeout,
)
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

import hpcdist.c10d.debug_server
import hpcdist.c10d.torch_init
from hpcdist import dist2
from hpcdist.c10d.coalescing import _coalescing_manager, all_gather_coalesced, all_reduce_coalesced
from hpcdist.c10d.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    gather_single,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from hpcdist.c10d.compat.deprecated import (
    _all_gather_base,
    _reduce_scatter_base,
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    dist_backend,
    gather_into_tensor,
    reduce_multigpu,
    reduce_scatter_multigpu,
)
from hpcdist.c10d.debug import breakpoint, set_debug_level, set_debug_level_from_env, stop_requested
from hpcdist.c10d.device_mesh import DeviceMesh, init_device_mesh
from hpcdist.beyond.elastic import ElasticJob, elastic
from hpcdist.c10d.groups import new_group, new_subgroups, new_subgroups_by_enumeration, set_timeout, split_group
from hpcdist.beyond.halo import HaloExchange, exchange
from hpcdist.c10d.monitored import monitored_barrier
from hpcdist.c10d.lifecycle import destroy_process_group, init_process_group
from hpcdist.c10d.names import (
    Backend,
    BackendConfig,
    get_default_backend_for_device,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
    supports_complex,
)
from hpcdist.beyond.node_shared import node_shared
from hpcdist.c10d.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from hpcdist.c10d.point_to_point import P2POp, batch_isend_irecv, recv, send
from hpcdist.beyond.profile import Profile, profile
from hpcdist.c10d.queries import (
    GroupMember,
    _get_process_group_name,
    _rank_not_in_group,
    get_backend,
    get_backend_config,
    get_backend_impl,
    get_global_rank,
    get_group_rank,
    get_mpi_comm,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    is_initialized,
    reduce_op,
)
from hpcdist.beyond.reproducible import reproducible
from hpcdist.c10d.shrink import SHRINK_ABORT, SHRINK_DEFAULT, failed_ranks, revoke_process_group, shrink_group
from hpcdist.beyond.varied import all_gather_varied, all_to_all_varied, reduce_scatter_varied
from hpcdist.beyond.window import Window
from hpcdist.core.point_to_point import irecv, isend
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.work import Work
from hpcdist.launch.rendezvous import _create_store_from_options, register_rendezvous_handler, rendezvous
from hpcdist.torch_bridge import compiler as _compiler
from hpcdist.torch_bridge.mirror import GroupName
from hpcdist.torch_bridge.private_names import UNDERSCORED as _UNDERSCORED
from hpcdist.torch_bridge.private_names import BuiltinCommHookType, GradBucket, Logger, ProcessGroupGloo, Reducer
from hpcdist.torch_bridge.profiler import record_comm
from hpcdist_stores import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "SHRINK_ABORT", "SHRINK_DEFAULT", "AllToAllOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "Backend",
    "BackendConfig", "BarrierOptions", "BroadcastOptions", "BuiltinCommHookType", "DebugLevel", "DeviceMesh",
    "DistBackendError", "DistError", "DistNetworkError", "DistStoreError", "ElasticJob", "FileStore",
    "GatherOptions", "GradBucket", "GroupMember", "GroupName", "HaloExchange", "HashStore", "Logger", "P2POp",
    "PrefixStore", "ProcessGroup", "ProcessGroupGloo", "Profile", "QueueEmptyError", "ReduceOp", "ReduceOptions",
    "ReduceScatterOptions", "Reducer", "ScatterOptions", "Store", "TCPStore", "Window", "Work", "all_gather",
    "all_gather_coalesced", "all_gather_into_tensor", "all_gather_multigpu", "all_gather_object",
    "all_gather_single", "all_gather_varied", "all_reduce", "all_reduce_coalesced", "all_reduce_multigpu",
    "all_to_all", "all_to_all_single", "all_to_all_varied", "barrier", "batch_isend_irecv", "breakpoint",
    "broadcast", "broadcast_multigpu", "broadcast_object_list", "default_pg_timeout", "destroy_process_group",
    "dist2", "dist_backend", "elastic", "exchange", "failed_ranks", "gather", "gather_into_tensor", "gather_object",
    "gather_single", "get_backend", "get_backend_config", "get_backend_impl", "get_debug_level",
    "get_default_backend_for_device", "get_global_rank", "get_group_rank", "get_mpi_comm", "get_node_local_rank",
    "get_pg_count", "get_process_group_ranks", "get_rank", "get_world_size", "group", "init_device_mesh",
    "init_process_group", "irecv", "is_available", "is_backend_available", "is_gloo_available", "is_initialized",
    "is_mpi_available", "is_nccl_available", "is_torchelastic_launched", "is_ucc_available", "is_xccl_available",
    "isend", "monitored_barrier", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "node_shared",
    "profile", "record_comm", "recv", "recv_object_list", "reduce", "reduce_multigpu", "reduce_op",
    "reduce_scatter", "reduce_scatter_multigpu", "reduce_scatter_single", "reduce_scatter_tensor",
    "reduce_scatter_varied", "register_rendezvous_handler", "rendezvous", "reproducible", "revoke_process_group",
    "scatter", "scatter_object_list", "send", "send_object_list", "set_debug_level", "set_debug_level_from_env",
    "set_timeout", "shrink_group", "split_group", "stop_requested", "supports_complex",
]  # fmt: skip

globals().update(_UNDERSCORED)
_compiler.run_as_they_are(globals()[name] for name in __all__)
