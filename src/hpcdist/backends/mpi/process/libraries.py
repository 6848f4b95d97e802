"""Files of the MPI libraries in this process: the libraries themselves, and the memory that MPICH shares on a node.

MPICH 5 names that memory, and removes the name only in MPI_Finalize: a job that is killed leaves a file in /dev/shm,
1 MiB a rank. Nobody opens it after MPI_Init, which returns once every rank of the node has mapped it (MPICH's posix
``comm_bootstrap`` waits for a flag of each). So the name can go at once; the memory lives as long as a process maps it.

Open MPI and Intel MPI need nothing: the launcher of the one removes what a rank leaves, the other takes the names away
by itself.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

MAPS = Path("/proc/self/maps")
MPICH = "MPICH Version"  # what MPI_Get_library_version begins with; derived libraries share in their own ways
SEGMENT = "/dev/shm/mpich_shm_"


def loaded_libraries() -> list[str]:
    """Return the paths of the MPI libraries in this process, of any bytes, spaces too; none if there is no /proc."""
    try:
        maps = os.fsdecode(MAPS.read_bytes())
    except OSError:
        return []
    return list(dict.fromkeys(re.findall(r"(/.*/libmpi[^/\s]*\.so[^/\s]*)", maps)))


@cache
def unlink_segments(MPI: Any) -> None:
    """Take away the names of the segments that MPICH's MPI_Init has mapped in this process; any rank, any time after.

    A file that this process does not map is another job's, also if it has the name of one of ours.
    """
    if not MPI.Get_library_version().startswith(MPICH):
        return
    with suppress(OSError):  # no /proc, no files: nothing is found
        for line in filter(None, os.fsdecode(MAPS.read_bytes()).split("\n")):  # other files' paths have any bytes
            _, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(SEGMENT):
                with suppress(FileNotFoundError):  # a rank of this node was quicker
                    if os.stat(path[0]).st_ino == int(inode):
                        os.unlink(path[0])
