"""How does torch's gloo carry a process group? CPU tensors over sockets, found through a store."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as c10d

from hpcdist.backends.foreign import ForeignBackend
from hpcdist.core.backend import Bootstrap


def process_group(bootstrap: Bootstrap) -> Any:
    """Make torch's gloo group over the bootstrap's store."""
    if bootstrap.store is None:
        raise ValueError("backend 'gloo' needs a store or an init_method to find the other ranks")
    return c10d.ProcessGroupGloo(bootstrap.store, bootstrap.rank, bootstrap.size, bootstrap.timeout)


class GlooBackend(ForeignBackend):
    """A group of torch's gloo."""

    name: ClassVar[str] = "gloo"
    creator = staticmethod(process_group)
