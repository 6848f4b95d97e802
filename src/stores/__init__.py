"""Key-value stores for processes that share an address, a file, or memory.

    from hpcdist_stores import TCPStore

    store = TCPStore("127.0.0.1", 29500, world_size=2, is_master=rank == 0)

The names, arguments and errors are torch.distributed's, and every store is a ``torch.distributed.Store``: it
can be handed to torch's gloo, or to ``torch.distributed.init_process_group(store=...)``. The package needs
neither MPI nor hpcdist.

Imports point down: ``tcp.store`` -> ``tcp.session`` -> ``tcp.connection`` -> ``tcp.wire``; ``file.store`` ->
``file.users`` -> ``file.log``; HashStore and FileStore -> ``dict_store``; all stores -> ``base`` -> ``keep_alive``,
``errors``; all -> ``integers``.
``tcp.server`` runs in a process of its own, which ``process`` starts: ``loop`` -> ``requests`` ->
``keys`` use the standard library only.
"""

from torch.distributed import DistError, DistNetworkError, DistStoreError, QueueEmptyError

from hpcdist_stores.base import Store
from hpcdist_stores.file.store import FileStore
from hpcdist_stores.hash_store import HashStore
from hpcdist_stores.prefix_store import PrefixStore
from hpcdist_stores.tcp.store import TCPStore

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
