"""How does torch's gloo carry a process group? CPU tensors over sockets, found through a store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as c10d

from hpcdist.backends.foreign import ForeignBackend
from hpcdist.core.backend import Bootstrap
from hpcdist.core.errors import DistBackendError


def process_group(bootstrap: Bootstrap) -> Any:
    """Make torch's gloo group over the bootstrap's store."""
    if bootstrap.store is None:
        raise ValueError("backend 'gloo' needs a store or an init_method to find the other ranks")
    return c10d.ProcessGroupGloo(bootstrap.store, bootstrap.rank, bootstrap.size, bootstrap.timeout)


class GlooBackend(ForeignBackend):
    """A group of torch's gloo."""

    name: ClassVar[str] = "gloo"
    creator = staticmethod(process_group)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> bool:
        """Run gloo's: its messages cannot be asked, without waiting, whether they have come."""
        try:
            self.inner.monitored_barrier(timeout, wait_all_ranks)
        except RuntimeError as error:
            raise DistBackendError(str(error)) from error
        return True
