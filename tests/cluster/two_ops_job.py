"""Job of two ranks whose all_reduce differs in op, which MPI cannot notice: what they are told, and when."""

import sys
import time

import torch

import hpcdist as dist

dist.init_process_group()
OPS = dist.ReduceOp.SUM, dist.ReduceOp.MAX
rank = dist.get_rank()


def differ(group=None):
    """Make calls of both kinds, and then one that differs."""
    for op in (*OPS, OPS[rank]):
        dist.all_reduce(torch.ones(4), op, group)


def print_failure(when, call):
    """Print the error that a call raises."""
    try:
        call()
    except dist.DistError as error:
        sys.stdout.write(f"{when} on {rank}: {error}\n")
        sys.stdout.flush()


group = dist.new_group()
differ(group)
deadline = time.monotonic() + 20
while group.any_backend().call_log().failure is None and time.monotonic() < deadline:  # a second, if nobody is busy
    time.sleep(0.01)
print_failure("next call", lambda: dist.barrier(group))
print_failure("its end", lambda: dist.destroy_process_group(group))  # which raises it no more
group = dist.new_group()
# a rank may still be in its call when the other one, which is at the end, finds the difference
print_failure("end", lambda: (differ(group), dist.destroy_process_group(group)))
differ()
