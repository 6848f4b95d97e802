"""hpcdist: PyTorch's torch.distributed API on the MPI that your cluster already has, with stock wheels.

    import hpcdist as dist
    dist.init_process_group()          # mpirun / srun: MPI.  torchrun: a store and gloo.  alone: one process
    dist.all_reduce(tensor)            # a torch tensor or a NumPy array

Layout; imports point down only:

    hpcdist.cli      the commands
    hpcdist          the public names, and nothing else: ``public`` has them, and is imported when they are needed
    hpcdist.beyond   what c10d does not have: elastic jobs, halos, varied sizes, windows, shared tensors, profiles
    hpcdist.c10d     the facade: torch.distributed's names and signatures
    hpcdist.backends mpi, nccl, gloo, loopback: they import core and their own library
    hpcdist.watch    the watchdog, reports of hanging calls, the flight recorder, logs
    hpcdist.torch_bridge shows our groups to torch.distributed and torch.compile; knows what they keep private
    hpcdist.launch   this process's rank, and how it finds the others
    hpcdist.core     the engine: the table of collectives, the path of a call, groups, buffers, Work
    stores           key-value stores for launches without MPI; a package of its own
    hpcdist.autoload what `import torch` calls, so that torch.distributed knows the backend "hpcdist"; imports nothing

Importing hpcdist initialises no MPI. It imports torch with the first use of a public name; the commands that need no
torch do without it.
"""

import gc as _gc
import sys as _sys
import typing as _typing
from importlib import import_module as _import_module
from importlib.abc import MetaPathFinder as _MetaPathFinder
from importlib.machinery import PathFinder as _PathFinder

if _typing.TYPE_CHECKING:
    from hpcdist.public import *  # noqa: F403  # the names of its __all__

__version__ = "0.1.0"


_AFTER = ("torch", "hpcdist.c10d", "hpcdist.beyond")


class _Finder(_MetaPathFinder):
    """Finder of what brings our public names with it: torch then knows our backend, and so who imports parts of us."""

    def find_spec(self, name: str, path: _typing.Any = None, target: _typing.Any = None) -> _typing.Any:
        spec = _PathFinder.find_spec(name, path, target) if name in _AFTER else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def complete(module: _typing.Any) -> None:
                execute(module)
                if name != "torch" or not _is_importing():
                    _complete()

            spec.loader.exec_module = complete  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def _is_importing() -> bool:
    """Tell whether a module of ours, which the public names need, is still being imported: it imports torch."""
    return any(
        name.startswith(("hpcdist.", "hpcdist_stores")) and getattr(module.__spec__, "_initializing", False)
        for name, module in [*_sys.modules.items()]
        if not name.startswith("hpcdist.cli.")
    )


def _complete() -> None:
    """Import the public names."""
    if _FINDER in _sys.meta_path:
        _sys.meta_path.remove(_FINDER)
    is_collecting = _gc.isenabled()
    _gc.disable()  # modules stay: a search for garbage, which goes through all of torch's, takes longer than they do
    try:
        found = vars(_import_module("hpcdist.public"))
    finally:
        if is_collecting:
            _gc.enable()
    globals().update({name: value for name, value in found.items() if name == "__all__" or not name.startswith("__")})


if not _typing.TYPE_CHECKING:  # else each name would be known

    def __getattr__(name: str) -> _typing.Any:
        """Return a name that has not been asked for before (PEP 562)."""
        if name == "__all__" or not name.startswith("__"):
            _complete()
        if name in globals():
            return globals()[name]
        is_torchs = not name.startswith("__") and hasattr(_sys.modules.get("torch.distributed"), name)
        where = f"; torch.distributed.{name} is torch's, for the same groups" if is_torchs else ""
        raise AttributeError(
            f"module 'hpcdist' has no attribute {name!r}{where}", name=name, obj=_sys.modules[__name__]
        )

    def __dir__() -> list[str]:
        _complete()
        return sorted(globals())


if "torch" in _sys.modules:
    _complete()
else:
    _sys.meta_path.insert(0, _FINDER)
