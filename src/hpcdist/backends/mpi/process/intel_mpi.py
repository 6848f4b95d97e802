"""Intel MPI's limit on threads: a setting that lets two threads of a rank be in collectives at once.

At MPI_THREAD_MULTIPLE a blocking call blocks only its own thread (MPI 4.1, 11.6). Intel MPI 2021.18 breaks this rule.
Within a node its collectives share memory, and a rank that waits in one keeps its other
threads out of MPI: an asynchronous call on one group and any call on another wait for each other forever (MPI_Bcast of
1 KiB on 3 ranks, MPI_Reduce of 1 KiB on 2, MPI_Allreduce of 4 MiB on 3; 8 of 8 runs of ``tests/parity`` on 3 ranks).
Its collectives over messages do not, and take as long: from 4 B to 16 MiB on 2 and 4 ranks the two are within 10 %,
except for MPI_Bcast of 4 KiB on 2 ranks (0.8 and 1.3 µs) and of 1 MiB on 4 (0.15 and 0.22 ms), while others gain as
much.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

VENDOR = "Intel MPI"
VARIABLE, VALUE = "I_MPI_COLL_INTRANODE", "pt2pt"


def prepare(MPI: Any) -> None:
    """Choose collectives that threads may call, before MPI starts, unless the user has chosen."""
    if MPI.get_vendor()[0] == VENDOR:
        os.environ.setdefault(VARIABLE, VALUE)


@cache
def warn_once(vendor: str) -> None:
    """Warn if MPI runs with collectives that threads may not call."""
    if vendor == VENDOR and os.environ.get(VARIABLE) != VALUE:
        warnings.warn(
            f"asynchronous calls on one group and calls on another can wait for each other for ever: this {VENDOR} was "
            f"started without {VARIABLE}={VALUE}. Set it before MPI starts",
            RuntimeWarning,
            stacklevel=2,
        )
