"""From how many bytes on is a collective faster through node-shared memory than through MPI itself?

That depends on the MPI library, the collective, the dtype and the number of ranks, so it is a table of measurements:
`python -m hpcdist bench --explain` prints what holds for the present run, and `python -m hpcdist bench` shows on any
machine whether it should be otherwise. `HPCDIST_SHM` overrides the whole table: a number of bytes (suffix K or M) from
which every collective uses shared memory, or "off".

Bytes are those of the larger of the two buffers, measured on 2 cores with 2 and 4 ranks
(docs/explanation/performance.md).
An MPI library that was not measured gets the row of MPICH, whose algorithms most libraries inherit.
"""

from __future__ import annotations

import os
import sys

import torch

from hpcdist.backends.mpi.node_arithmetic import KINDS, WIDER
from hpcdist.core.table import Row, Shape

VARIABLE = "HPCDIST_SHM"
NODE_KEY_VARIABLE = "HPCDIST_NODE_KEY"
NEVER = sys.maxsize
KIB, MIB = 1 << 10, 1 << 20

# library -> collective -> (bytes with two ranks, bytes with more)
BYTES: dict[str, dict[str, tuple[int, int]]] = {
    "Open MPI": {
        "all_reduce": (16 * KIB, 1 * MIB),
        "broadcast": (4 * MIB, 1 * MIB),
        "all_gather_single": (64 * MIB, 256 * KIB),
        "reduce_scatter_single": (256 * KIB, 1 * MIB),
        "all_to_all_single": (16 * MIB, NEVER),
    },
    "MPICH": {
        "all_reduce": (16 * KIB, 1 * MIB),
        "broadcast": (4 * MIB, 1 * MIB),
        "all_gather_single": (NEVER, 1 * MIB),
        "reduce_scatter_single": (4 * MIB, 16 * MIB),
        "all_to_all_single": (16 * MIB, NEVER),
    },
    "Intel MPI": {
        "all_reduce": (4 * MIB, 16 * MIB),
        "broadcast": (NEVER, 4 * MIB),
        "all_gather_single": (NEVER, 4 * MIB),
        "reduce_scatter_single": (4 * MIB, 16 * MIB),
        "all_to_all_single": (NEVER, NEVER),
    },
}

# MPI has no half types: the alternative is to widen, reduce and round, which doubles what MPI moves
HALF_BYTES = 16 * KIB
ACROSS_NODES = ("all_reduce",)  # the other collectives stay in one node


def override() -> int | None:
    """Return what the environment sets in place of the table, in bytes; None where it sets nothing.

    Raises:
        ValueError: not a number of bytes.
    """
    text = os.environ.get(VARIABLE, "").strip().lower()
    if not text:
        return None
    if text == "off":
        return NEVER
    digits, unit = (text[:-1], text[-1]) if text[-1] in "km" else (text, "")
    if not digits.isdigit():
        raise ValueError(f'{VARIABLE}={text!r}; expected a number of bytes such as 65536, 64K or 4M, or "off"')
    # nothing at all needs no memory to travel through
    return max(1, int(digits) * {"": 1, "k": KIB, "m": MIB}[unit])


def node_key() -> str | None:
    """Return what stands for this rank's node where one machine imitates several, else None."""
    return os.environ.get(NODE_KEY_VARIABLE)


def floor_bytes(row: Row, world_size: int, library: str) -> int:
    """Return how many bytes a rank sends at least where a collective uses shared memory, whatever its dtype."""
    op = "SUM" if row.reduces else None
    least = min(min_bytes(row.name, dtype, op, world_size, library) for dtype in (torch.float32, torch.bfloat16))
    return least if row.shape is not Shape.GATHER or least == NEVER else least // world_size


def min_bytes(name: str, dtype: torch.dtype, op: str | None, world_size: int, library: str) -> int:
    """Return from how many bytes on a collective uses node-shared memory; `sys.maxsize` means never.

    Args:
        name: the row's name, such as "all_reduce".
        dtype: the tensors' dtype.
        op: the reduction's name, None where nothing is reduced.
        world_size: ranks of the group.
        library: name of the MPI library as `mpi4py.MPI.get_vendor` gives it.
    """
    table = BYTES.get(library, BYTES["MPICH"])
    if world_size == 1 or name not in table or (op is not None and dtype not in KINDS) or op == "PREMUL_SUM":
        return NEVER
    chosen = override()
    if chosen is not None:
        return chosen
    if op is not None and dtype in WIDER and table[name][0] != NEVER:
        return HALF_BYTES
    return table[name][0 if world_size == 2 else 1]
