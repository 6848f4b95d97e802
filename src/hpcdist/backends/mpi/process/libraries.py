"""Files of the MPI libraries that this process has loaded."""

from __future__ import annotations

import re
from pathlib import Path


def loaded_libraries() -> list[str]:
    """Return the paths of the MPI libraries in this process; none if there is no /proc."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return list(dict.fromkeys(re.findall(r"\s(/\S*/libmpi[^/\s]*\.so[^/\s]*)", maps)))
