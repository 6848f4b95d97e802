"""Files of the MPI libraries that this process has loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

MAPS = Path("/proc/self/maps")


def loaded_libraries() -> list[str]:
    """Return the paths of the MPI libraries in this process, of any bytes, spaces too; none if there is no /proc."""
    try:
        maps = os.fsdecode(MAPS.read_bytes())
    except OSError:
        return []
    return list(dict.fromkeys(re.findall(r"(/.*/libmpi[^/\s]*\.so[^/\s]*)", maps)))
