"""The command ``debug``: shows a running job, in the terminal or in a browser.

Each rank's watchdog is asked where the rank is, as the watchdogs ask each other, also while its main thread is inside
MPI. Ranks on this machine are found by themselves, others by a Slurm job's number, or by the address that a job prints.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hpcdist.cli.job_arguments import JobParser, file, positive


def parser() -> JobParser:
    made = JobParser("debug", __doc__)
    made.add_argument("job", nargs="?", help="a Slurm job's number, or HOST:PORT; your job on this machine without it")
    made.add_argument("--pid", type=int, help="a process of the job, where several run on this machine")
    made.add_argument("--once", action="store_true", help="print one picture and end")
    made.add_argument("--stacks", action="store_true", help="print every rank's stack, not only those of late ranks")
    made.add_argument("--seconds", type=positive, default=2.0, metavar="N", help="between two pictures (2)")
    made.add_argument("--html", type=file, metavar="FILE", help="write one picture to a page for a browser, and end")
    made.add_argument("--serve", type=port, metavar="PORT", help="serve the page on 127.0.0.1; 0 for any free port")
    return made


def is_port(text: str) -> bool:
    return text.isdecimal() and int(text) <= 65535


def port(text: str) -> int:
    if not is_port(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; expected a number from 0 to 65535")
    return int(text)


def is_address(text: str) -> bool:
    host, _, number = text.rpartition(":")
    return host != "" and is_port(number)


def allocation(job: str) -> str:
    """Return a job's own number, for srun: an array's task, such as ``4711_1``, has another one."""
    if job.isdecimal():
        return job
    with suppress(OSError):  # without Slurm, srun's error says so
        command = ["squeue", "--noheader", f"--jobs={job}", "--format=%A"]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.split()
        return said[0] if said else job
    return job


def run_there(command: list[str]) -> int:
    """Run srun to its end, or until Ctrl-C, which ends it; return its exit status."""
    try:
        # in a session of its own: srun itself would ask for a second Ctrl-C
        started = subprocess.Popen(command, start_new_session=True)
    except FileNotFoundError:
        print("error: no srun on the PATH; run this where the cluster's Slurm is", file=sys.stderr)
        return 1
    try:
        return started.wait()
    except KeyboardInterrupt:
        started.terminate()
        started.wait()
        return 0


def run(args: list[str]) -> int:
    """Show a running job until it has ended; return 0, or srun's status, 1 if none is found or it does not answer."""
    given = parser().parse_args(args)
    if given.job is not None and (asked := re.fullmatch(r"(\d+([_+]\d+)?)(\.\d+)?", given.job)):
        options = ((f"--{name}", value) for name, value in vars(given).items() if name != "job")
        chosen = ((name, value) for name, value in options if value is not None and value is not False)
        rest = [name if value is True else f"{name}={value}" for name, value in chosen]
        where_it_runs = ["srun", "--quiet", f"--jobid={allocation(asked[1])}", "--overlap", "--nodes=1", "--ntasks=1"]
        return run_there([*where_it_runs, sys.executable, "-m", "hpcdist", "debug", *rest])
    if given.job is not None and not is_address(given.job):
        parser().error(f"{given.job!r}: expected a Slurm job's number or HOST:PORT")
    from hpcdist.cli.running_job import as_html, as_text, at, find, look, serve
    from hpcdist.core.printing import printable

    try:
        job = find(given.pid) if given.job is None else at(given.job)
        if given.serve is not None:
            serve(job, given.serve, given.seconds)
            return 0
        look(job)  # starts the timing of calls
        time.sleep(min(1.0, given.seconds))
        if given.html:
            Path(given.html).write_text(as_html(look(job), None), encoding="utf-8")
            return 0
        while True:
            text = as_text(look(job), given.stacks)
            print(text if given.once else f"\033[H\033[2J{text}", flush=True)
            if given.once or not job.liveness.living():
                return 0
            time.sleep(given.seconds)
    except BrokenPipeError:  # the reader of the output has ended
        raise
    except OSError as error:  # no such job; or the page cannot be written or served
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
