"""Job that counts steps; at SIGUSR1 on any rank all write and end at the same step."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--checkpoint", type=Path, required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--status", type=int, default=0, help="the exit status of a run that was stopped")
options = parser.parse_args()

warnings = []
signal.signal(signal.SIGUSR1, lambda *_: warnings.append(1))
comm = MPI.COMM_WORLD
first = int(options.checkpoint.read_text()) if options.resume else 0
if comm.rank == 0:
    print(f"starts at step {first}", flush=True)
for step in range(first, options.steps):
    time.sleep(0.1)
    if comm.allreduce(len(warnings), op=MPI.MAX):
        if comm.rank == 0:
            new = options.checkpoint.with_suffix(".new")
            new.write_text(str(step))
            os.replace(new, options.checkpoint)
            print(f"stopped at step {step}", flush=True)
        comm.Barrier()
        sys.exit(options.status)
if comm.rank == 0:
    print(f"finished {options.steps} steps", flush=True)
