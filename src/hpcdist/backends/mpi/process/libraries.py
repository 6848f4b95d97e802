"""Files of the MPI libraries that this process has loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

MAPS = Path("/proc/self/maps")


def loaded_libraries() -> list[str]:
    """Return the paths of the MPI libraries in this process; those of folders may have any bytes, spaces too."""
    found = re.findall(r"(/.*/libmpi[^/\s]*\.so[^/\s]*)", os.fsdecode(MAPS.read_bytes()))
    return list(dict.fromkeys(found))
