"""The command ``doctor``: tests everything that a job needs, as one process or under mpirun, srun or torchrun.

It prints one page for all ranks, and exits with 1 if something is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from argparse import Namespace
from functools import partial
from typing import Any

import hpcdist as dist
from hpcdist.cli.doctor import (
    devices,
    installed,
    memory,
    mpi_library,
    mpi_world,
    network,
    page,
    placement,
    slurm_step,
    speed,
)
from hpcdist.cli.doctor.findings import PROBLEM, Facts, Finding
from hpcdist.cli.doctor.supervision import CONNECTION, Step, supervise, watch
from hpcdist.cli.job_arguments import JobParser, file, positive
from hpcdist.launch import environment

SECONDS = 120.0  # seconds for one topic; the longest is the start of MPI in a large job

LOCAL = "before MPI is started, on each rank by itself"
IN_WORLD = "with the world's communicator, None without MPI"
IN_GROUP = "with the default group"
# the page's chapters in order, each with its module, whose ``look`` runs checks on every rank and returns facts, and
# whose ``judge`` turns the facts of all ranks into findings on rank 0; and with when it looks
TOPICS: dict[str, tuple[Any, str]] = {
    "installed": (installed, LOCAL),
    "mpi_library": (mpi_library, LOCAL),
    "mpi_world": (mpi_world, IN_WORLD),
    "placement": (placement, LOCAL),
    "memory": (memory, IN_WORLD),
    "devices": (devices, LOCAL),
    "slurm": (slurm_step, LOCAL),
    "network": (network, IN_GROUP),
    "speed": (speed, IN_GROUP),
}


def parser() -> JobParser:
    made = JobParser("doctor", __doc__)
    made.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    made.add_argument("--html", type=file, metavar="FILE", help="write the page for the browser too")
    made.add_argument("--seconds", type=positive, default=SECONDS, help="limit of each topic (default %(default)g)")
    return made


def run(args: list[str]) -> int:
    """Run the command; return 0 if nothing is wrong, 1 if something is, 2 for wrong arguments."""
    options = parser().parse_args(args)
    warnings.simplefilter("ignore")  # the findings include the warnings of mpi4py and torch
    work, report = partial(examine, options=options), partial(report_end, options=options)
    if CONNECTION in os.environ:
        return watch(work, options.seconds, report)
    if start := slurm_step.whole_allocation():
        line = [*start, sys.executable, "-m", "hpcdist", "doctor", *args]
        print("$", *line, file=sys.stderr, flush=True)
        return subprocess.run(line, env=mpi_library.mpi_free_environment(), check=False).returncode
    return supervise(work, options.seconds, report)


def examine(tell: Step, options: Namespace) -> int:
    """Run all checks on this rank, let rank 0 write the page, and return the exit status."""
    facts: Facts = {}

    def look(when: str, *world: Any) -> None:
        for name, (topic, its_time) in TOPICS.items():
            if its_time == when:
                tell(name)
                facts[name] = topic.look(*world)

    look(LOCAL)
    tell("starting MPI")
    comm, failure = start(facts)
    look(IN_WORLD, comm)
    look(IN_GROUP)
    tell("merging the ranks' findings")
    size = dist.get_world_size()
    ranks: list[Facts] | None = [{}] * size if dist.get_rank() == 0 else None
    dist.gather_object(facts, ranks, 0)
    status = [0]
    if ranks is not None:
        chapters = judge(ranks) | ({mpi_world.TITLE: [failure]} if failure else {})
        status = [1 if page.count(chapters, PROBLEM) else 0]
        launch = environment.detect()
        # without a common world every rank has a world of its own
        if (failure is None or launch is None or launch.rank == 0) and not show(chapters, ranks, options):
            status = [1]
    dist.broadcast_object_list(status, 0)
    dist.destroy_process_group()
    return status[0]


def start(facts: Facts) -> tuple[Any, Finding | None]:
    """Create the world that a script's ``init_process_group()`` would create; if that fails, one of one rank.

    Return its communicator, None without MPI; and the finding of a failure, if any.
    """
    launch = environment.detect()
    failure: Finding | None = None
    if launch is not None and launch.conflict:
        fix = "unset RANK WORLD_SIZE   # before the launcher starts the ranks"
        failure = Finding(PROBLEM, launch.conflict, fix)
    elif launch is not None and not launch.starts_mpi:
        dist.init_process_group()
        return None, None
    elif facts["mpi_library"]["error"] is None:
        try:
            dist.init_process_group("mpi")
            return dist.get_mpi_comm(), None
        except dist.DistBackendError as error:
            text = str(error).removesuffix(launch.remedy if launch is not None else "").strip()
            failure = Finding(PROBLEM, text, mpi_library.remedy_of_launch(facts["mpi_library"]))
    dist.init_process_group("loopback", world_size=1)
    return None, failure


def judge(ranks: list[Facts]) -> page.Chapters:
    return {
        topic.TITLE: list(topic.judge([facts[name] for facts in ranks]))
        for name, (topic, _) in TOPICS.items()
        if name in ranks[0]
    }


def show(chapters: page.Chapters, ranks: list[Facts], options: Namespace) -> bool:
    """Print the page, and write it for the browser if requested; tell whether that succeeded."""
    if options.json:
        page.write_json(chapters, ranks)
    else:
        page.write(chapters, len(ranks))
    try:
        if options.html:
            page.write_html(chapters, len(ranks), options.html)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


def report_end(how: str, options: Namespace) -> None:
    """Report checks that ended their process or did not end: a page on the launcher's rank 0, a line on others."""
    launch = environment.detect()
    text = f"{how}; its output is above"
    if launch is not None and launch.rank != 0:
        print(f"hpcdist doctor, rank {launch.rank}: {text}", file=sys.stderr)
        return
    seen = {name: TOPICS[name][0].look() for name in ("installed", "mpi_library", "slurm")}
    failure = Finding(PROBLEM, text, mpi_library.remedy_of_launch(seen["mpi_library"]))
    show(judge([seen]) | {mpi_world.TITLE: [failure]}, [seen], options)
