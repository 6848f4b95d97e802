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

from .node_arithmetic import KINDS, WIDER

VARIABLE = "HPCDIST_SHM"
NODE_KEY_VARIABLE = "HPCDIST_NODE_KEY"
NEVER = sys.maxsize
KIB, MIB = 1 << 10, 1 << 20

# library -> collective -> (bytes with two ranks, bytes with more)
BYTES: dict[str, dict[str, tuple[int, int]]] = {
    "Open MPI": {
        "all_reduce": (16 * KIB, 1 * MIB),
        "broadcast": (4 * MIB, 256 * KIB),
        "all_gather_single": (16 * MIB, 256 * KIB),
        "reduce_scatter_single": (256 * KIB, 1 * MIB),
        "all_to_all_single": (16 * MIB, NEVER),
    },
    "MPICH": {
        "all_reduce": (16 * KIB, 1 * MIB),
        "broadcast": (4 * MIB, 1 * MIB),
        "all_gather_single": (16 * MIB, 1 * MIB),
        "reduce_scatter_single": (4 * MIB, 4 * MIB),
        "all_to_all_single": (16 * MIB, NEVER),
    },
    "Intel MPI": {
        "all_reduce": (4 * MIB, NEVER),
        "broadcast": (NEVER, NEVER),
        "all_gather_single": (NEVER, NEVER),
        "reduce_scatter_single": (4 * MIB, NEVER),
        "all_to_all_single": (NEVER, NEVER),
    },
}

# MPI has no half types: the alternative is to widen, reduce and round, which doubles what MPI moves
HALF_BYTES = 16 * KIB
ACROSS_NODES = ("all_reduce",)  # the other collectives stay in one node
LEAST = 16 * KIB  # no row of the table is below; one comparison keeps small messages out


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


def least_bytes(world_size: int) -> int:
    """Return the size below which no collective uses shared memory, whatever its dtype."""
    chosen = override()
    if world_size == 1:
        return NEVER
    return LEAST if chosen is None else chosen


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
