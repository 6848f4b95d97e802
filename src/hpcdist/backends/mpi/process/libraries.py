"""Files of the MPI libraries in this process: the libraries themselves, and the memory that MPICH shares on a node.

MPICH 5 names that memory, and removes the name only in MPI_Finalize: a killed job leaves a file in /dev/shm, 1 MiB for
each rank. No process opens it after MPI_Init, which returns once every rank of the node has mapped it (MPICH's posix
``comm_bootstrap`` waits for a flag of each). So the name can be removed at once; the memory lives as long as a process
maps it.

Open MPI and Intel MPI do not need this: the launcher of the former removes the files of its ranks, the latter removes
the names by itself.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

MAPS = Path("/proc/self/maps")
MPICH = "MPICH Version"  # beginnings of MPI_Get_library_version; derived libraries share memory in their own ways
SEGMENT = "/dev/shm/mpich_shm_"


def loaded_libraries() -> list[str]:
    """Return the paths of the MPI libraries in this process, which may contain any bytes; none without /proc."""
    try:
        maps = os.fsdecode(MAPS.read_bytes())
    except OSError:
        return []
    return list(dict.fromkeys(re.findall(r"(/.*/libmpi[^/\s]*\.so[^/\s]*)", maps)))


def loaded_library() -> str | None:
    """Return the path of the MPI library in this process, the first if there are several."""
    return next(iter(loaded_libraries()), None)


@cache
def unlink_segments(MPI: Any) -> None:
    """Remove the names of the segments that MPICH's MPI_Init has mapped in this process; any rank calls, at any time.

    A file that this process does not map belongs to another job, even if it has the name of one of ours.
    """
    if not MPI.Get_library_version().startswith(MPICH):
        return
    with suppress(OSError):  # without /proc nothing is found
        for line in filter(None, os.fsdecode(MAPS.read_bytes()).split("\n")):  # paths may contain any bytes
            _, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(SEGMENT):
                with suppress(FileNotFoundError):  # another rank of this node was faster
                    if os.stat(path[0]).st_ino == int(inode):
                        os.unlink(path[0])
