"""Check of the installed torch when hpcdist is imported: one line that says what is missing."""

from __future__ import annotations

import torch
import torch.distributed as dist


def check_torch() -> None:
    """Raise ImportError if this torch has no ``torch.distributed``, or is older than 2.8."""
    found = f"torch {torch.__version__} in {next(iter(torch.__path__))}"
    if not dist.is_available():
        raise ImportError(f"hpcdist needs torch.distributed, without which this torch was built: {found}")
    if not hasattr(dist, "QueueEmptyError"):  # the newest name of torch that hpcdist uses without a check
        raise ImportError(f"hpcdist supports torch 2.8 and later, and this is {found}")


check_torch()
