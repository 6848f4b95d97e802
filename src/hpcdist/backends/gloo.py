"""Backend of torch's gloo: CPU tensors over sockets, the ranks found through a store."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as c10d

from hpcdist.backends.torch_c10d import C10dBackend
from hpcdist.core.backend import Bootstrap
from hpcdist.core.errors import DistBackendError
from hpcdist.launch import addresses
from hpcdist.torch_bridge import private_names


def process_group(bootstrap: Bootstrap) -> Any:
    """Make torch's gloo group over the bootstrap's store.

    gloo's default is the address of the host's name, which on Debian is the loopback; so it gets the address at which
    the ranks reach each other, unless ``GLOO_SOCKET_IFNAME`` chooses the interfaces.
    """
    store, rank, size, timeout = bootstrap.store, bootstrap.rank, bootstrap.size, bootstrap.timeout
    if store is None:
        raise ValueError("backend 'gloo' needs a store or an init_method to find the other ranks")
    address = None if os.environ.get(addresses.CHOICE) else addresses.address_among(store, size)
    if address is None:
        group: Any = c10d.ProcessGroupGloo(store, rank, size, timeout)
    else:
        group = private_names.gloo_at(address, store, rank, size, timeout)
    group.barrier().wait()  # a connected rank may close the group at once, and others would fail to connect
    return group


class GlooBackend(C10dBackend):
    """A group of torch's gloo."""

    name: ClassVar[str] = "gloo"
    compares_calls: ClassVar[bool] = True
    creator = staticmethod(process_group)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later calls; gloo itself uses it for collectives only."""
        self.inner._set_default_timeout(timeout)
        self.message_limit = timeout.total_seconds()

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> bool:
        """Run gloo's own: its messages cannot be polled without waiting."""
        try:
            self.inner.monitored_barrier(timeout, wait_all_ranks)
        except RuntimeError as error:
            raise DistBackendError(str(error)) from error
        return True
