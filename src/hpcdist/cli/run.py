"""The command ``run``: runs an unmodified torch.distributed script with its groups made by hpcdist.

``mpirun -n 4 python -m hpcdist run train.py --epochs 3``. The script's ``init_process_group("gloo")`` or ``("mpi")``
creates hpcdist's default group. The variables that torchrun would set are made from the launcher's, or RANK and
WORLD_SIZE are those of one process without a launcher, so scripts that read them work too.

The script stays ``__main__`` after its last line, unlike with ``runpy.run_path``: threads, exit functions and
``sys.excepthook`` pickle the script's classes by that name, and start processes that import it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import zipfile
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType

from hpcdist.c10d.names import is_mpi_available
from hpcdist.cli.job_arguments import JobParser
from hpcdist.launch import decision, environment, pmi, slurm_step, topology
from hpcdist.torch_bridge import registration

UNKNOWN_HOST = "rank0.invalid"  # a name that cannot exist (RFC 2606)
TORCHRUNS_PORT = 29500


def parser() -> JobParser:
    made = JobParser("run", __doc__)
    made.add_argument("-m", dest="module", action="store_true", help="the script is a module's name, as for python -m")
    made.add_argument("script", help="the script to run, unmodified")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments").required = False
    return made


def announce(launch: environment.Launch | None) -> None:
    """Set the variables that torchrun would set, unless they are set already.

    RANK without WORLD_SIZE, and WORLD_SIZE without RANK, are ignored. Without a launcher LOCAL_RANK is not set:
    Lightning would take it as a sign that its processes have been started.
    """
    found: dict[str, int | str | None] = {"RANK": 0, "WORLD_SIZE": 1}
    if launch is not None:
        found = variables(launch)
    elif not found.keys().isdisjoint(os.environ):
        return
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        os.environ.update(RANK=str(found["RANK"]), WORLD_SIZE=str(found["WORLD_SIZE"]))
    for variable, value in found.items():
        if value is not None:
            os.environ.setdefault(variable, str(value))


def variables(launch: environment.Launch) -> dict[str, int | str | None]:
    """Return torchrun's variables; None for those that this launcher does not provide.

    The address is only for programs that print or compare it: under MPI hpcdist does not use it.
    """
    rank, size, local_rank = launch.rank, launch.size, environment.node_local_rank()
    local_size = topology.local_size(os.environ) or (1 if size == 1 else None)
    node = environment.node_index(local_size, launch)
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": -(-size // local_size) if local_size else None,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": slurm_step.first_host(os.environ) or ("127.0.0.1" if local_size == size else UNKNOWN_HOST),
        "MASTER_PORT": TORCHRUNS_PORT,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }


def run(args: list[str]) -> int:
    """Run a script with its groups made by hpcdist; return 0, or 2 without a script or with contradicting variables.

    The script's exceptions, SystemExit included, are passed on.
    """
    given = parser().parse_args(args)
    try:
        launch = decision.with_size(decision.find_launch())
    except ValueError as error:
        print(f"python -m hpcdist run: {error}", file=sys.stderr)
        pmi.end_waiting_ranks()
        return 2
    announce(launch)
    registration.divert(launch, is_mpi_available)
    sys.argv = [given.script, *given.arguments]
    script = Path(given.script).absolute()
    if given.module:
        run_module(given.script, os.getcwd())
    elif (script / "__main__.py").is_file() or zipfile.is_zipfile(script):
        run_module("__main__", str(script), alter_argv=False)
    elif script.is_file():
        run_file(script)
    else:
        print(f"python -m hpcdist run: no script {given.script!r} in {os.getcwd()}; expected a path", file=sys.stderr)
        return 2
    return 0


def main_module(folder: str) -> ModuleType:
    """Return a new, empty ``__main__``, whose imports look into a folder first, and not into that of this command."""
    own = 0 if getattr(sys.flags, "safe_path", False) else 1  # python -P puts none there
    sys.path[:own] = [folder]
    made = sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["__mp_main__"] = made  # what spawned processes call it: multiprocessing was imported before
    return made


def run_module(name: str, folder: str, **options: bool) -> None:
    """Run a module as ``python -m`` does, or the main program of a folder or archive as ``python FOLDER`` does."""
    main_module(folder)
    runpy._run_module_as_main(name, **options)  # type: ignore[attr-defined]  # what both of Python's own options call


def run_file(path: Path) -> None:
    """Run a file as ``python FILE`` does: without writing what it was compiled to."""
    file, program = str(path), main_module(str(path.resolve().parent))
    if path.suffix == ".pyc":
        program.__loader__ = compiled = SourcelessFileLoader("__main__", file)
        code = compiled.get_code("__main__")
    else:
        program.__loader__ = source = SourceFileLoader("__main__", file)
        code = source.source_to_code(source.get_data(file), file)
    program.__file__ = file
    assert code is not None  # a loader of a package may have none
    exec(code, program.__dict__)
