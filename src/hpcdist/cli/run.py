"""The command ``run``: runs an unmodified torch.distributed script with its groups made by hpcdist.

``mpirun -n 4 python -m hpcdist run train.py --epochs 3``. The script's ``init_process_group("gloo")`` or ``("mpi")``
creates hpcdist's default group. RANK, WORLD_SIZE and LOCAL_RANK, which torchrun would set, are taken from the launcher,
or are those of one process without a launcher, so scripts that read these variables work too.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from hpcdist.cli.job_arguments import JobParser, described
from hpcdist.launch import environment
from hpcdist.torch_bridge import registration


def parser() -> JobParser:
    """Return the parser of the command line."""
    made = JobParser(prog="python -m hpcdist run", description=described(__doc__).partition("\n")[0])
    made.add_argument("-m", dest="module", action="store_true", help="the script is a module's name, as for python -m")
    made.add_argument("script", help="the script to run, unmodified")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return made


def announce(launch: environment.Launch | None) -> None:
    """Set the variables that torchrun would set, unless they are set already."""
    found: dict[str, int | None] = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    if launch is not None:
        found = {"RANK": launch.rank, "WORLD_SIZE": launch.size, "LOCAL_RANK": environment.node_local_rank()}
    for variable, value in found.items():
        if value is not None:
            os.environ.setdefault(variable, str(value))


def run(args: list[str]) -> int:
    """Run a script with its groups made by hpcdist.

    Returns:
        0, or 2 if there is no such script. Whatever the script raises, SystemExit included, is passed on.
    """
    given = parser().parse_args(args)
    launch = environment.detect()
    announce(launch)
    registration.divert(launch)
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
