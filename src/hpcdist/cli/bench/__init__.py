"""The command ``bench``: times hpcdist beside mpi4py, gloo and a memory copy.

Start it by ``mpirun -n N python -m hpcdist bench [SUBJECT]``. All sides run on the same ranks and the same buffers, in
interleaved rounds of one run, so that noise on the machine affects all of them alike. The time of a round is that of
the slowest rank.
"""

from __future__ import annotations

import argparse
import importlib
from importlib.util import find_spec
from typing import Any

import torch

from hpcdist.backends.mpi.node.thresholds import number_of_bytes
from hpcdist.cli.bench import plots, report
from hpcdist.cli.bench.timing import open_bench
from hpcdist.cli.job_arguments import JobParser, count, file, positive

# subject -> the module with ``measure(bench)``
SUBJECTS: dict[str, str] = {
    "collectives": "hpcdist.cli.bench.collectives",
    "calls": "hpcdist.cli.bench.calls",
    "p2p": "hpcdist.cli.bench.p2p",
    "ddp": "hpcdist.cli.bench.torch_libraries",
    "torch": "hpcdist.cli.bench.torch_libraries",
}


def size_in_bytes(text: str) -> int:
    if not (nbytes := number_of_bytes(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected bytes such as 4, 64K or 16M")
    return nbytes


def ratio(text: str) -> int:
    """Read the ratio of successive sizes."""
    if (times := count(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 2 or more")
    return times


def dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is not a torch dtype; expected one such as float32 or bfloat16")
    return found


def parser() -> JobParser:
    made = JobParser("bench", __doc__)
    add, sides = made.add_argument, ["hpcdist", "mpi4py", "gloo", "copy"]
    about = f"what is timed: {', '.join(SUBJECTS)} (collectives)"
    add("subject", nargs="?", default="collectives", choices=SUBJECTS, metavar="SUBJECT", help=about)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: collectives, beside torch's NCCL")
    add("--collectives", nargs="+", metavar="NAME", default=["all_reduce"], help='or "all" (all_reduce)')
    add("--dtypes", nargs="+", type=dtype, default=[torch.float32], metavar="DTYPE", help="of the buffers (float32)")
    add("--min", type=size_in_bytes, default=4, help="smallest size (4)")
    add("--max", type=size_in_bytes, default=256 << 20, help="largest size (256M)")
    add("--factor", type=ratio, default=4, help="ratio of one size to the one before (4)")
    add("--sizes", nargs="+", type=size_in_bytes, metavar="SIZE", help="these sizes instead of --min to --max")
    add("--parameters", type=positive, default=10e6, help="of a model that ddp and torch train (10 million)")
    add("--batch", type=count, default=1, help="samples a rank of DDP's step (1)")
    add("--bucket-mb", type=positive, default=25, help="DDP's bucket_cap_mb (25)")
    add("--rounds", type=count, default=7, help="rounds, of which the median is shown (7)")
    add("--seconds", type=positive, default=0.05, help="length of one side's round (0.05)")
    about = f"what is compared: {', '.join(sides)} (all)"
    add("--sides", nargs="+", default=sides, choices=sides, metavar="SIDE", help=about)
    add("--json", type=file, metavar="FILE", help="write the figures to this file too")
    add("--csv", type=file, metavar="FILE", help="the same, a line for each figure")
    add("--html", type=file, metavar="FILE", help="a page with plots; needs matplotlib: pip install 'hpcdist[plot]'")
    about = "print from which size on shared memory is used, and by which setting, and time nothing"
    add("--explain", action="store_true", help=about)
    return made


def run(args: list[str]) -> int:
    made = parser()
    options = made.parse_args(args)
    is_cuda = options.device == "cuda"
    if options.html and find_spec("matplotlib") is None:
        made.error(plots.MISSING)
    module: Any = importlib.import_module("hpcdist.cli.bench.cuda" if is_cuda else SUBJECTS[options.subject])
    if is_cuda and (lacks := module.missing()) is not None:
        made.error(lacks)
    start = "start bench by a launcher of MPI: mpirun -n 2 python -m hpcdist bench"
    with open_bench(options, made, start, "cpu:mpi,cuda:nccl" if is_cuda else None) as bench:
        if options.explain:
            report.explain(bench)
            return 0
        if lacks := bench.comm.bcast(report.unwritable(options) if bench.rank == 0 else ""):
            made.error(lacks)
        status = module.measure(bench)
        report.write(bench)
        plots.write(bench)
    return int(status or 0)
