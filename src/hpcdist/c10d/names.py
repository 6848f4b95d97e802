"""Names of backends and the meaning of a backend string: c10d's ``Backend`` and ``BackendConfig``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.distributed as c10d

from hpcdist.core import registry
from hpcdist.launch import decision, environment

BackendType = c10d.ProcessGroup.BackendType


class Backend(str):
    """A backend's name, as a lower-case string; ``Backend("MPI")`` is ``"mpi"``.

    Raises:
        ValueError: not a string.
    """

    __slots__ = ()

    UNDEFINED = "undefined"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"
    FAKE = "fake"
    LOOPBACK = "loopback"
    TORCH = "torch"

    backend_list: ClassVar[list[str]] = [UNDEFINED, GLOO, NCCL, XCCL, UCC, MPI, FAKE, LOOPBACK, TORCH]
    default_device_backend_map: ClassVar[dict[str, str]] = {"cpu": MPI, "cuda": NCCL, "xpu": XCCL, "mps": GLOO}
    backend_capability: ClassVar[dict[str, list[str]]] = {
        GLOO: ["cpu"],
        NCCL: ["cuda"],
        XCCL: ["xpu"],
        UCC: ["cpu", "cuda"],
        MPI: ["cpu", "cuda"],
        FAKE: ["cpu", "cuda", "hpu", "xpu"],
        LOOPBACK: ["cpu", "cuda"],
        TORCH: ["xpu" if getattr(torch.version, "xpu", None) else "cuda"],
    }
    backend_type_map: ClassVar[dict[str, Any]] = {
        name: getattr(BackendType, name.upper(), BackendType.CUSTOM) for name in backend_list
    }

    def __new__(cls, name: str) -> str:  # type: ignore[misc]
        """Return the name in lower case, as a plain string, which is c10d's habit."""
        if not isinstance(name, str):
            raise ValueError(f"Backend constructor parameter must be string-ish, got {type(name).__name__}")
        return name.lower()

    @classmethod
    def register_backend(
        cls, name: str, func: Callable[..., Any], extended_api: bool = False, devices: str | list[str] | None = None
    ) -> None:
        """Register a c10d backend under a name.

        Args:
            name: the name for ``init_process_group``.
            func: makes a c10d backend from ``(store, rank, world_size, timeout)``, or with ``extended_api`` from
                ``(options, pg_options)``.
            extended_api: the arguments of ``func``, see above.
            devices: the device types that it carries; None, with a warning, for cpu and cuda.
        """
        lower = name.lower()
        if not hasattr(cls, name.upper()):
            setattr(cls, name.upper(), lower)
        if lower not in cls.backend_list:
            cls.backend_list.append(lower)
        if devices is None:
            warnings.warn(
                f"Device capability of {name} unspecified, assuming `cpu` and `cuda`. Please specify it via the "
                "`devices` argument of `register_backend`.",
                stacklevel=2,
            )
            carried = ["cpu", "cuda"]
        else:
            carried = [devices] if isinstance(devices, str) else list(devices)
            for device in carried:
                cls.default_device_backend_map.setdefault(device, lower)
        cls.backend_capability[lower] = carried
        cls.backend_type_map[lower] = BackendType.CUSTOM
        registry.PLUGINS[lower] = (func, extended_api)


class BackendConfig:
    """The backend of each device type: ``"mpi"``, or ``"cpu:mpi,cuda:nccl"``.

    Raises:
        ValueError: a string that is neither a name nor pairs of device and name.
    """

    def __init__(self, backend: str) -> None:
        self.device_backend_map: dict[str, str] = {}
        text = str(backend).lower()
        if text == Backend.UNDEFINED:
            accelerator = torch.accelerator.current_accelerator()
            device = accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"
            if device not in Backend.default_device_backend_map:
                raise ValueError(
                    f"We detected accelerator {device} on your machine, but no backend is known for it (known: "
                    f"{Backend.default_device_backend_map}). Please specify the `backend` argument."
                )
            self.device_backend_map[device] = Backend.default_device_backend_map[device]
        elif ":" in text:
            self.device_backend_map = parse_pairs(text)
        elif text in Backend.backend_list:
            self.device_backend_map = dict.fromkeys(Backend.backend_capability[text], text)
        else:
            warnings.warn(
                f"Device capability of {text} unknown, assuming `cpu` and `cuda`. You can specify it in "
                "`device:backend` format in `init_process_group` call.",
                stacklevel=2,
            )
            self.device_backend_map = {"cpu": text, "cuda": text, "xpu": text}

    def __repr__(self) -> str:
        """Return all pairs, separated by commas."""
        return ",".join(f"{device}:{backend}" for device, backend in self.device_backend_map.items())

    def get_device_backend_map(self) -> dict[str, str]:
        """Return the backend of each device type."""
        return self.device_backend_map


def parse_pairs(text: str) -> dict[str, str]:
    """Return the pairs of a string such as ``"cpu:mpi,cuda:nccl"``."""
    pairs: dict[str, str] = {}
    for part in text.split(","):
        device, colon, name = (piece.strip() for piece in part.partition(":"))
        if not (device and colon and name) or ":" in name:
            raise ValueError(
                f"Invalid device:backend pairing: {part!r} in the backend string {text!r}; expected "
                '"<device_type1>:<backend1>,<device_type2>:<backend2>...", e.g. "cpu:mpi,cuda:nccl"'
            )
        if device in pairs:
            raise ValueError(f"Duplicate device type {device} in backend string: {text}")
        pairs[device] = name
    return pairs


# c10d's own, whose types and gloo hpcdist shares. ``all_reduce`` and its like also multiply complex numbers
is_available = c10d.is_available
is_gloo_available = c10d.is_gloo_available
is_torchelastic_launched = c10d.is_torchelastic_launched
supports_complex = c10d.supports_complex


def is_mpi_available() -> bool:
    """Tell, without initializing MPI, whether backend "mpi" works: there are an MPI library and its launcher."""
    if find_spec("mpi4py") is None:
        return False
    try:
        decision.check_mpi(decision.find_launch())
        from hpcdist.backends.mpi.process import runtime

        runtime.load()
    except (ImportError, RuntimeError, ValueError):
        return False
    return True


def may_connect(launch: environment.Launch) -> bool:
    """Tell whether MPI can connect the launcher's ranks, as far as variables show it."""
    from hpcdist.backends.mpi.process import runtime

    return runtime.may_connect(runtime.load(), launch)


def is_nccl_available() -> bool:
    """Tell whether nccl4py is installed, or torch has RCCL, and there is a GPU."""
    if torch.version.hip is not None:
        return c10d.is_nccl_available() and torch.cuda.is_available()
    return "nccl" in registry.ENTRIES and find_spec("nccl") is not None and torch.cuda.is_available()


def is_ucc_available() -> bool:
    """Return False: hpcdist has no UCC backend."""
    return False


def is_xccl_available() -> bool:
    """Tell whether this torch has XCCL and there is a GPU."""
    return hasattr(torch, "xpu") and torch.xpu.is_available() and c10d.is_xccl_available()


def is_torch_available() -> bool:
    """Tell whether this torch's own library for GPUs can be used here."""
    return is_xccl_available() or (c10d.is_nccl_available() and torch.cuda.is_available())


AVAILABLE: dict[str, Callable[[], bool]] = {
    "mpi": is_mpi_available,
    "nccl": is_nccl_available,
    "gloo": is_gloo_available,
    "ucc": is_ucc_available,
    "xccl": is_xccl_available,
    "loopback": lambda: True,
    "torch": is_torch_available,
}


def is_backend_available(backend: str) -> bool:
    """Tell whether a backend, or each backend of a string of pairs, can be used here."""
    text = backend.lower()
    names = parse_pairs(text).values() if ":" in text else [text]
    return all(AVAILABLE[name]() if name in AVAILABLE else name in registry.PLUGINS for name in names)


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the backend that would carry a device's tensors in this process, which depends on the launcher.

    For the CPU that is MPI, or gloo if the launcher (torchrun) starts no MPI.

    Raises:
        ValueError: no backend is known for the device.
    """
    kind = (device if isinstance(device, torch.device) else torch.device(device)).type
    if (backend := Backend.default_device_backend_map.get(kind)) is None:
        raise ValueError(
            f"Default backend not registered for device : {device} (registered: {Backend.default_device_backend_map})"
        )
    launch = environment.detect()
    if backend == Backend.MPI and launch is not None and not launch.starts_mpi:
        return Backend.GLOO
    return backend
