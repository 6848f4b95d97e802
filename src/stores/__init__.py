"""Which key-value stores are there?

    import stores

    store = stores.TCPStore("127.0.0.1", 29500, world_size=2, is_master=rank == 0)

The names, arguments and errors are torch.distributed's, and every store here is a
``torch.distributed.Store``: it can be handed to torch's gloo, or to
``torch.distributed.init_process_group(store=...)``. The package needs neither MPI nor hpcdist.

Import direction: ``tcp_store`` -> ``tcp_session`` -> ``tcp_link`` -> ``tcp_wire``; all stores ->
``base`` -> ``keep_alive``, ``errors``. ``tcp_helper`` -> ``tcp_server`` -> ``tcp_requests`` ->
``tcp_space`` -> ``tcp_wire`` are the standard library alone: they run in a process of their own, started
by ``server_process``.
"""

from torch.distributed import DistError, DistNetworkError, DistStoreError, QueueEmptyError

from stores.base import Store
from stores.file_store import FileStore
from stores.hash_store import HashStore
from stores.prefix_store import PrefixStore
from stores.tcp_store import TCPStore

__all__ = [
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "TCPStore",
]
