"""Naps of a wait between two looks at what it waits for: the longer it has lasted, the longer they are.

A nap of a 32nd of the wait so far delays its end by 1.5 % on average, and leaves the core to others. On Linux 6.18 it
does more: if threads of a session nap thousands of times a second while others of it call `sched_yield`, as Open MPI
does on a crowded machine, all other processes may be left without a core for half a minute (docs, Known issues).
"""

import time

SHARE = 1 / 32  # of the wait so far
SHORTEST, LONGEST = 50e-6, 2e-3  # seconds


def nap(waited: float) -> None:
    """Sleep for a share of the time that a wait has lasted, in seconds."""
    time.sleep(min(max(waited * SHARE, SHORTEST), LONGEST))
