"""What the ranks of these jobs have in common: each tells what happens to it, and may have a node of its own."""

from __future__ import annotations

import json
import os
import time

from hpcdist.launch import environment

LAUNCH = environment.detect()
ME = LAUNCH.rank if LAUNCH is not None else 0  # also once the group is smaller


def tell(event: str, **more: object) -> None:
    """Write a line of JSON."""
    line = json.dumps({"rank": ME, "event": event, "time": time.time(), "pid": os.getpid(), **more})
    os.write(1, f"\n{line}\n".encode())


def imitate_nodes() -> None:
    """Give each rank a node of its own choice, where FAULT_NODES says so ("a,a,b,b")."""
    if nodes := os.environ.get("FAULT_NODES"):
        os.environ[environment.NODE_KEY] = nodes.split(",")[ME]
