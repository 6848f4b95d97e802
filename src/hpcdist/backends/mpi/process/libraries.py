"""Files of the MPI libraries that this process has loaded."""

from __future__ import annotations

import re
from pathlib import Path


def loaded_libraries() -> list[str]:
    """Return the paths of the MPI libraries in this process."""
    found = re.findall(r"\s(/\S*/libmpi[^/\s]*\.so[^/\s]*)", Path("/proc/self/maps").read_text())
    return list(dict.fromkeys(found))
