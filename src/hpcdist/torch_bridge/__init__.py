"""Bridge to ``torch.distributed``: shows it our groups, and takes its calls to make some.

torch's libraries look groups up in tables that ``torch.distributed`` keeps for itself. They are written here, and what
else torch keeps private is used here or in ``torch_bridge.compiler`` and ``.dispatch``, and nowhere else
(``tests/project/test_private_torch.py``). What is touched, and the versions where that was checked:

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``distributed_c10d._world`` (pg_map, pg_names,        DDP, FSDP2, DTensor, DCP find ranks, names, the     2.13.0, 2.15.0
pg_group_ranks, pg_backend_config, tags_to_pg,        backend's name and the store of a group there
pg_to_tag, group_count, default_pg)
``distributed_c10d._update_default_pg``               sets the default group and the rank that C++ logs   2.13.0, 2.15.0
``_C._distributed_c10d._register_process_group``,     functional collectives resolve a group by its name  2.13.0, 2.15.0
``._unregister_process_group``
``rendezvous._rendezvous_handlers["env"]``            ``init_process_group("hpcdist")`` without           2.13.0, 2.15.0
                                                      MASTER_ADDR, where the launcher starts MPI
``distributed_c10d.rendezvous`` (hpcdist_autoload)    the same where no one imports hpcdist               2.13.0, 2.15.0
``distributed_c10d._new_process_group_helper``,       ``python -m hpcdist run``: "mpi" and "gloo" become  2.13.0, 2.15.0
``.rendezvous``, ``.is_mpi_available``                "hpcdist" in an unmodified script
``distributed_c10d.monitored_barrier``                refuses, on 2.13, what is not named "gloo"          2.13.0
``distributed_c10d._maybe_attach_flight_recorder``    raises for a group made in Python                  2.15.0
``device_mesh.DeviceMesh._init_one_process_group``    one MPI_Comm_split a dimension, for all its groups  2.13.0, 2.15.0
``_mesh_layout._MeshLayout``                          which ranks the groups of that dimension have       2.13.0, 2.15.0
``_C._distributed_c10d._current_process_group``,      ``dist2``'s group of this thread is torch's too     2.13.0, 2.15.0
``._set_process_group``
``autograd.profiler._is_profiler_enabled``            whether a profiler runs                             2.13.0
``autograd._record_function_with_args_enter``,        asynchronous events of a profiler, with shapes      2.13.0, 2.15.0
``ops.profiler._call_end_callbacks_on_jit_fut``,
``_C._distributed_c10d._get_comm_profiling_name``
``distributed_c10d._DistributedBackendOptions``,      what ``Backend.register_backend``'s creators take  2.13.0, 2.15.0
``Work._source_rank``                                 and from whom it received
``ProcessGroupGloo._Options``                         ``hpcdist bench`` has gloo on one interface         2.13.0, 2.15.0
``torch.testing``'s ``fake_pg``,                       ``hpcdist bench`` times torch's own part of a call  2.13.0
``distributed._functional_collectives``
``cuda._sleep``                                       ``hpcdist bench`` keeps a GPU busy meanwhile        2.14.1
the underscore names of ``torch.distributed``         handed on by ``c10d.torch_names`` as is; 2.15      2.13.0, 2.15.0
                                                      has no ``_ControlCollectives, _StoreCollectives``
====================================================  ==================================================  ==============
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch._C._distributed_c10d as bindings
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed._mesh_layout import _MeshLayout

from hpcdist.core import hooks
from hpcdist.core.backend import Bootstrap
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.world import WORLD
from hpcdist.launch import environment

NAME = "hpcdist"  # of the backend, as torch.distributed.init_process_group takes it
DEVICES = ["cpu", "cuda"]
DIVERTED = frozenset({"mpi", "gloo", "undefined", NAME})  # what `hpcdist run` carries itself

autograd: Any = torch.autograd
rendezvous_module: Any = __import__("torch.distributed.rendezvous", fromlist=["rendezvous"])


# -- our groups, shown to torch ----------------------------------------------------------------------------


class TorchWorld:
    """torch.distributed's tables of groups, as a mirror of ours (``core.world.Mirror``)."""

    def next_index(self, made: int) -> int:
        """Return a number that neither we nor torch have given to a group."""
        index = max(made, c10d._world.group_count)
        c10d._world.group_count = index + 1
        return index

    def count(self) -> int:
        """Return how many groups torch has counted: on every rank, also where this one is not a member."""
        return c10d._world.group_count

    def add(self, group: ProcessGroup) -> None:
        """Enter a group in the tables, as c10d enters one that ``new_group`` made."""
        world, name = c10d._world, group.group_name
        tag = f"ptd:{name}"
        world.pg_map[group] = (NAME, bindings.PrefixStore(f"{name}/", LATE_STORE))
        world.pg_names[group] = name  # type: ignore[assignment]
        world.pg_group_ranks[group] = dict(group.group_ranks)
        world.pg_backend_config[group] = ",".join(f"{device}:{NAME}" for device in group.backends)
        world.pg_to_tag[group] = tag
        for each in ("", tag):
            world.tags_to_pg.setdefault(each, []).append(group)
        bindings._register_process_group(c10d.GroupName(name), group)
        if group is WORLD.default:
            world.group_count = max(world.group_count, WORLD.made)
            c10d._update_default_pg(group)

    def remove(self, group: ProcessGroup) -> None:
        """Take a group out of the tables."""
        world = c10d._world
        if group not in world.pg_map:
            return
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            table.pop(group, None)
        for tag in ("", world.pg_to_tag.pop(group, "")):
            members = world.tags_to_pg.get(tag, [])
            if group in members:
                members.remove(group)
            if not members:
                world.tags_to_pg.pop(tag, None)
        bindings._unregister_process_group(c10d.GroupName(group.group_name))

    def clear(self) -> None:
        """End torch's world, with the groups that it made itself."""
        if dist.is_initialized():
            dist.destroy_process_group()


def show(groups: Iterable[Any]) -> None:
    """Make our world torch's too; a torch.distributed that is initialised already is left alone."""
    if dist.is_initialized():
        return
    mirror = TorchWorld()
    for group in groups:
        mirror.add(group)
    WORLD.mirror = mirror


def join(default: Any) -> None:
    """Follow torch's world, which itself enters ``default`` in its tables."""
    WORLD.made = max(WORLD.made, c10d._world.group_count)
    WORLD.mirror = TorchWorld()


def is_taken() -> bool:
    """Tell whether torch.distributed has a default group, ours or another."""
    return dist.is_initialized()


def is_shown(group: Any) -> bool:
    """Tell whether torch.distributed knows a group."""
    return group in c10d._world.pg_map


class LateStore(bindings.Store):
    """The world's store, opened when it is first used: few programs ask for one, and a server costs time.

    Under MPI the first use opens it for all ranks, so all of them have to come to it.

    Attributes:
        is_reserved: it is for groups of ours alone, since torch imported hpcdist and the program did not.
    """

    is_reserved = False

    def opened(self) -> Any:
        """Return the store itself."""
        if WORLD.store is None:
            from hpcdist.launch import rendezvous

            if WORLD.default is not None:
                return rendezvous.store_of(WORLD.default)
            if self.is_reserved:
                return next(STOCK["env"]("env://"))[0]  # its error says what is missing
            WORLD.store = next(iter(rendezvous.rendezvous("mpi://")))[0]
        return WORLD.store

    def check(self, keys: list[str]) -> bool:
        """Tell whether keys are there.

        c10d's own threads look for a signal now and then, each rank when it likes. They do not open the store, which
        takes all ranks: one that nobody has opened holds nothing.
        """
        if WORLD.store is None and isinstance(threading.current_thread(), threading._DummyThread):
            return False
        return bool(self.opened().check(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long calls wait; a store that is not open yet takes the world's limit when it opens."""
        if WORLD.store is not None:
            WORLD.store.set_timeout(timeout)


STORE_CALLS = (
    "set", "get", "add", "wait", "compare_set", "delete_key", "num_keys", "append", "multi_get",
    "multi_set", "has_extended_api", "queue_push", "queue_pop", "queue_len", "list_keys", "barrier", "clone",
)  # fmt: skip


def forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the opened store's method of the same name."""

    def call(self: LateStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.opened(), name)(*args, **kwargs)

    call.__name__ = name
    return call


for each in STORE_CALLS:
    setattr(LateStore, each, forwarded(each))

LATE_STORE = LateStore()  # C++ keeps only its half of a store made in Python, so this one lives for ever


# -- torch's calls to make a group -------------------------------------------------------------------------


def register(creator: Callable[[Any, Any], Any]) -> None:
    """Make the backend "hpcdist" known to torch.distributed, and "env://" content without MASTER_ADDR under MPI.

    Args:
        creator: makes a ProcessGroup of c10d's backend options and the caller's ``pg_options``.
    """
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, creator, extended_api=True, devices=DEVICES)
    handlers = rendezvous_module._rendezvous_handlers
    if handlers["env"] is not by_launcher:
        STOCK["env"] = handlers["env"]
        handlers["env"] = by_launcher
    open_monitored_barrier()
    keep_recorder_away()


def keep_recorder_away() -> None:
    """Keep torch 2.15 from attaching its flight recorder to groups of ours, which it cannot: ``watch`` records them."""
    stock = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if stock is None or "recorder" in STOCK:
        return
    STOCK["recorder"] = stock

    def attach(pg: Any, *args: Any) -> None:
        if not isinstance(pg, ProcessGroup):
            stock(pg, *args)

    setattr(c10d, "_maybe_attach_flight_recorder", attach)  # noqa: B010  # for mypy


def open_monitored_barrier() -> None:
    """Let ``torch.distributed.monitored_barrier`` take groups of ours: torch 2.13 does only what is named "gloo"."""
    if "monitored_barrier" in STOCK:
        return
    stock = STOCK["monitored_barrier"] = c10d.monitored_barrier

    @wraps(stock)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        pg: Any = c10d._world.default_pg if group is None else group
        if isinstance(pg, ProcessGroup):
            return pg.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]  # c10d.debug adds it
        return stock(group, timeout, wait_all_ranks)

    for module in (c10d, dist):
        setattr(module, "monitored_barrier", monitored_barrier)  # noqa: B010  # for mypy


def launched() -> environment.Launch | None:
    """Return how this process was started, as ``divert`` was told or as the environment says."""
    return LAUNCH[0] if LAUNCH else environment.detect()


LAUNCH: list[environment.Launch | None] = []
STOCK: dict[str, Callable[..., Any]] = {}  # what torch had in the places that we took


def by_launcher(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Take rank and size from an MPI launcher where the environment lacks what ``env://`` needs."""
    launch = launched()
    if "MASTER_ADDR" in os.environ or launch is None or not launch.starts_mpi:
        yield from STOCK["env"](url, *args, **kwargs)
        return
    yield fresh_store(), launch.rank, launch.size


def fresh_store() -> LateStore:
    """Return the store for a world that is about to begin."""
    if WORLD.default is None:
        WORLD.store = None
    return LATE_STORE


def registered() -> None:
    """Do nothing: importing this package has registered the backend.

    From 2.14 on torch calls this by an entry point, where ``hpcdist_autoload`` is switched off.
    """


MESH_ARGUMENTS = (
    ("sub_layout", "rank_map", "dim_name", "backend_override"),  # 2.13
    ("sub_layout", "rank_map", "dim_name", "backend_override", "preserve_rank_order"),  # 2.15
)


def split_meshes_by(make: Callable[[list[list[int]], str, bool], Any]) -> None:
    """Let DeviceMesh make all groups of a dimension in one step where the default group is ours.

    Args:
        make: makes disjoint groups of global ranks, with a description, numbered in ascending order or as given, and
            returns this rank's or None.
    """
    stock = device_mesh.DeviceMesh._init_one_process_group
    if tuple(inspect.signature(stock).parameters) not in MESH_ARGUMENTS:
        return  # another torch: its own loop over new_group makes the same groups, one by one

    def init_one(sub_layout: Any, rank_map: torch.Tensor, dim_name: str, backend_override: Any, *keeps: bool) -> Any:
        default: Any = WORLD.default
        if default is None or c10d._world.default_pg is not default or tuple(backend_override) != (None, None):
            return stock(sub_layout, rank_map, dim_name, backend_override, *keeps)
        ranks = _MeshLayout([sub_layout]).remap_to_tensor(rank_map).tolist()
        if sub_layout.numel() == dist.get_world_size() and (not any(keeps) or ranks[0] == sorted(ranks[0])):
            return stock(sub_layout, rank_map, dim_name, backend_override, *keeps)  # the default group itself
        mine = make(ranks, f"mesh_{dim_name}", not any(keeps))
        return mine.group_name if mine is not None else None

    setattr(device_mesh.DeviceMesh, "_init_one_process_group", staticmethod(init_one))  # noqa: B010  # for mypy


# -- single names that torch keeps for itself --------------------------------------------------------------


def named(name: str) -> Any:
    """Return what ``torch.distributed`` has under a name of its own, or None where this torch has it no more."""
    return getattr(dist, name, None)


def backend_options(given: Bootstrap) -> Any:
    """Return a group's bootstrap as c10d hands it to the creator of a backend."""
    assert given.store is not None
    options: Any = c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    options.store, options.group_rank, options.group_size = given.store, given.rank, given.size
    options.timeout = given.timeout
    return options


def sender(work: Any) -> int:
    """Return from which rank a finished receive of a c10d backend came."""
    return work._source_rank()


def gloo_at(host: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return torch's gloo on the network interface that has the address ``host``."""
    gloo = named("ProcessGroupGloo")
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=host)], timeout
    return gloo(store, rank, size, options)


def fake_group() -> Any:
    """Return a group of torch's with the ranks of its default group that sends nothing; every rank calls this."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    return dist.new_group(backend="fake")


def all_reduce_functionally(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum over all ranks by torch's functional collectives, waited for."""
    functional: Any = importlib.import_module("torch.distributed._functional_collectives")
    summed: torch.Tensor = functional.wait_tensor(functional.all_reduce(tensor, "sum", group))
    return summed


def current_group() -> Any:
    """Return the group that torch's code in this thread takes for the current one, or None."""
    return bindings._current_process_group()


def set_current_group(group: Any) -> None:
    """Set the group that torch's code in this thread takes for the current one."""
    bindings._set_process_group(group)


# -- an unmodified script on MPI ---------------------------------------------------------------------------


def divert(launch: environment.Launch | None) -> None:
    """Let ``init_process_group`` and ``new_group`` with "mpi" or "gloo" make groups of ours; once a process.

    ``get_backend`` goes on to say what the script asked for.

    Args:
        launch: how this process was started, before anyone set what torchrun sets.
    """
    if "helper" in STOCK:
        return
    LAUNCH.append(launch)
    meet_by_url = STOCK["rendezvous"] = rendezvous_module.rendezvous
    helper = STOCK["helper"] = c10d._new_process_group_helper

    def make(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        carried = str(backend) in DIVERTED
        if carried and size < 0:  # c10d asks nobody for its own MPI
            rank, size = (launch.rank, launch.size) if launch is not None else (0, 1)
        made = helper(size, rank, ranks, c10d.Backend(NAME) if carried else backend, *args, **kwargs)
        group, store = made
        if carried and group in c10d._world.pg_map:
            asked = NAME if str(backend) == "undefined" else str(backend)
            c10d._world.pg_map[group] = (asked, store)
            if asked != "gloo":
                group.logged_name = asked
        return made

    def meet(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
        if launch is not None and not launch.starts_mpi:
            yield from meet_by_url(url, rank, world_size, **kwargs)
        else:
            yield fresh_store(), launch.rank if launch is not None else 0, launch.size if launch is not None else 1

    patched: Any = c10d
    patched._new_process_group_helper, patched.rendezvous = make, meet
    modules: list[Any] = [patched, dist]
    for module in modules:
        module.is_mpi_available = lambda: True


# -- torch.profiler ----------------------------------------------------------------------------------------


ENDER = ThreadPoolExecutor(1, "hpcdist-profiler")  # begins its thread when a call is profiled


class AsynchronousEvent:
    """A profiler's event that ends on another thread than it began on, by which torch tells an asynchronous one.

    c10d's own are so, for synchronous calls too. The profiler takes note of an end on a thread that it does not watch
    only if a future brings it there.
    """

    def __init__(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        self._end: torch.futures.Future[None] = torch.futures.Future()
        self._thread = get_ident()
        handle = autograd._record_function_with_args_enter(name, *inputs)
        torch.ops.profiler._call_end_callbacks_on_jit_fut(handle, self._end)

    def __exit__(self, *_: object) -> None:
        """End it, on this thread or, if it began here, on one of its own."""
        if get_ident() == self._thread:
            ENDER.submit(self._end.set_result, None).result()
        else:
            self._end.set_result(None)


def record(name: str, inputs: Sequence[torch.Tensor]) -> hooks.Event:
    """Begin a profiler's event; ``record_comm``'s name goes before ours."""
    return AsynchronousEvent(bindings._get_comm_profiling_name() or name, inputs)


def is_profiled() -> bool:
    """Tell whether a profiler runs, by torch's note in Python: to ask C++ costs 4 µs where the caches are cold."""
    return profiler._is_profiler_enabled


hooks.is_profiled, hooks.record = is_profiled, record


# -- torch.cuda --------------------------------------------------------------------------------------------


def occupy_gpu(cycles: int) -> None:
    """Keep the current stream busy for a number of a GPU's cycles."""
    torch.cuda._sleep(cycles)


with suppress(ImportError):  # a torch without the private names that it uses
    from hpcdist.torch_bridge import dispatch  # noqa: F401  # it installs itself
