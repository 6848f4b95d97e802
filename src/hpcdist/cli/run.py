"""The command ``run``: runs an unmodified torch.distributed script with its groups made by hpcdist.

``mpirun -n 4 python -m hpcdist run train.py --epochs 3``. The script's ``init_process_group("gloo")`` or ``("mpi")``
creates hpcdist's default group. The variables that torchrun would set are made from the launcher's, or RANK and
WORLD_SIZE are those of one process without a launcher, so scripts that read them work too.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from hpcdist.c10d.names import is_mpi_available
from hpcdist.cli.job_arguments import JobParser
from hpcdist.launch import decision, environment, slurm_step, topology
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
        return 2
    announce(launch)
    registration.divert(launch, is_mpi_available)
    sys.argv = [given.script, *given.arguments]
    if given.module:
        sys.path[0:0] = [os.getcwd()]
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        return 0
    script = Path(given.script)
    if not script.is_file() and not (script / "__main__.py").is_file():
        print(f"python -m hpcdist run: no script {given.script!r} in {os.getcwd()}; expected a path", file=sys.stderr)
        return 2
    sys.path[0:0] = [str(script.resolve().parent)]
    runpy.run_path(str(script), run_name="__main__")
    return 0
