"""Subject ``varied``: time of collectives of varied sizes beside the two calls that a user of mpi4py writes.

Rank r has r + 1 shares of the size shown. ``in slots`` is one MPI_Allgather of messages padded to the largest, with the
sizes inside, which is what a group could do that keeps the sizes of the call before.
"""

from __future__ import annotations

import numpy as np
import torch

import hpcdist as dist
from hpcdist.cli.bench.timing import Bench

NBYTES = [64, 4096, 1 << 18]


def measure(bench: Bench) -> None:
    """Time each call at all sizes."""
    for nbytes in bench.options.sizes or NBYTES:
        all_gather(bench, nbytes)
        all_to_all(bench, nbytes)
        reduce_scatter(bench, nbytes)


def all_gather(bench: Bench, nbytes: int) -> dict[str, float]:
    """Time all_gather_varied of one size a share."""
    tensor = torch.zeros((bench.rank + 1) * nbytes // 4)
    comm, size, send, mine = bench.comm, bench.size, tensor.numpy(), np.zeros(1, np.int64)
    slot = np.zeros(8 + size * nbytes, np.uint8)  # as large as the largest rank's
    slots, head, place = np.zeros((size, slot.nbytes), np.uint8), slot[:8].view(np.int64), slot[8 : 8 + send.nbytes]

    def by_hand() -> np.ndarray:
        counts = np.empty(size, np.int64)
        mine[0] = send.size
        comm.Allgather(mine, counts)
        out = np.empty(counts.sum(), np.float32)
        comm.Allgatherv(send, (out, counts))
        return out

    def in_slots() -> np.ndarray:
        head[0] = send.nbytes
        place[:] = send.view(np.uint8)
        comm.Allgather(slot, slots)
        lengths = [int.from_bytes(each[:8].tobytes(), "little") for each in slots]
        return np.concatenate([each[8 : 8 + length] for each, length in zip(slots, lengths, strict=True)])

    sides = {"hpcdist": lambda: dist.all_gather_varied(tensor), "mpi4py": by_hand, "in slots": in_slots}
    return bench.compare("all_gather_varied", "float32", nbytes, sides)


def all_to_all(bench: Bench, nbytes: int) -> dict[str, float]:
    """Time all_to_all_varied of one size a share; each rank sends so many shares as its rank says."""
    tensors = [torch.zeros((bench.rank + 1) * nbytes // 4) for _ in range(bench.size)]
    arrays, comm, size = [each.numpy() for each in tensors], bench.comm, bench.size

    def by_hand() -> list[np.ndarray]:
        sent, received = np.array([each.size for each in arrays]), np.empty(size, np.int64)
        comm.Alltoall(sent, received)
        out = np.empty(received.sum(), np.float32)
        comm.Alltoallv((np.concatenate(arrays), sent), (out, received))
        return np.split(out, np.cumsum(received)[:-1])

    sides = {"hpcdist": lambda: dist.all_to_all_varied(tensors), "mpi4py": by_hand}
    return bench.compare("all_to_all_varied", "float32", nbytes, sides)


def reduce_scatter(bench: Bench, nbytes: int) -> dict[str, float]:
    """Time reduce_scatter_varied of one size a share."""
    comm, size, share, mine = bench.comm, bench.size, nbytes // 4, np.zeros(1, np.int64)
    tensor, wanted = torch.zeros(sum(range(1, size + 1)) * share), (bench.rank + 1) * share
    array = tensor.numpy()

    def by_hand() -> np.ndarray:
        counts = np.empty(size, np.int64)
        mine[0] = wanted
        comm.Allgather(mine, counts)
        out = np.empty(wanted, np.float32)
        comm.Reduce_scatter(array, out, counts.tolist())
        return out

    sides = {"hpcdist": lambda: dist.reduce_scatter_varied(tensor, wanted), "mpi4py": by_hand}
    return bench.compare("reduce_scatter_varied", "float32", nbytes, sides)
