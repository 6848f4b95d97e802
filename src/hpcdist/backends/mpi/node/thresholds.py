"""Thresholds: from how many bytes on hpcdist carries a collective out itself, in place of MPI.

On one node that is through shared memory, on several by messages between nodes and shared memory in each.

They depend on the MPI library, the collective, the dtype, the number of ranks and the machine, so they are a table of
measurements: ``python -m hpcdist bench --explain`` prints what holds for the present run, and
``python -m hpcdist bench crossover`` measures a machine's own and writes them to a file. ``HPCDIST_SHM`` takes the
table's place: the name of such a file, a number of bytes (suffix K or M) for every collective, or "off".

Bytes are those of the larger of the two buffers. The table is what two machines agree on where they do, with 2 and 4
ranks; on several nodes what loses least on 2 of 2 ranks at 200 Mbit/s, 1 Gbit/s and as fast as one machine's processors
carry TCP, and on 4 nodes of one rank by the kind of network (``network``; docs/explanation/performance.md). An MPI
library that was not measured gets the row of MPICH, whose algorithms most libraries inherit. On nodes of one rank the
faster the network, the better MPI's own collectives compare, so with RDMA, which was not measured, MPI keeps all of
them but half types, whose bytes it doubles. On a fast network without RDMA, 3 or 4 nodes gain by long messages
(`messages.LONG`); 2 nodes, with a core for each rank, and 8 nodes gained with one MPI or collective what they lost
with another, and more were not measured. On a slow one, Open MPI's small broadcasts go down a chain of 3 or 4 nodes.

All ranks of a group must have the same thresholds, because ranks in the window and ranks in MPI would wait for each
other. So the environment is read once, when the default group is made; its ranks compare what they found
(``fingerprint``), and every group made from it inherits its thresholds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from hpcdist.backends.mpi.node.arithmetic import DTYPES, WIDER

VARIABLE = "HPCDIST_SHM"
NEVER = sys.maxsize
KIB, MIB = 1 << 10, 1 << 20
UNITS = {"": 1, "K": KIB, "M": MIB, "G": 1 << 30}
STAND_IN = "MPICH"


class Network(IntEnum):
    """Kind of network between nodes of one rank."""

    UNKNOWN = 0  # or of no matter
    SLOW = 1  # its cables set the pace
    FAST = 2  # the processors do
    RDMA = 3


# library -> number of ranks on one node, or which nodes -> collective -> bytes
Measured = dict[str, dict[int | str, dict[str, int]]]
NODES = {False: "nodes of several ranks", True: "nodes of one rank"}
ON_FAST = "nodes of one rank, fast network"
# what differs from that with 3 or 4 nodes
FEW = {NODES[True]: "3 or 4 nodes of one rank, slow network", ON_FAST: "3 or 4 nodes of one rank, fast network"}

BYTES: Measured = {
    "Open MPI": {
        2: {
            "all_reduce": 64 * KIB,
            "broadcast": 4 * MIB,
            "all_gather_single": NEVER,
            "reduce_scatter_single": 256 * KIB,
        },
        4: {
            "all_reduce": 1 * MIB,
            "broadcast": 128 * KIB,
            "all_gather_single": 128 * KIB,
            "reduce_scatter_single": 1 * MIB,
        },
        NODES[False]: {
            "all_reduce": 1 * MIB,
            "broadcast": 256 * KIB,
            "all_gather_single": 1 * MIB,
            "reduce_scatter_single": 1 * MIB,
        },
        NODES[True]: {
            "all_reduce": 1 * MIB,
            "broadcast": 1 * MIB,
            "all_gather_single": 1 * MIB,
            "reduce_scatter_single": 1 * MIB,
        },
        FEW[NODES[True]]: {"broadcast": 64 * KIB},
        ON_FAST: {
            "all_reduce": NEVER,
            "broadcast": NEVER,
            "all_gather_single": NEVER,
            "reduce_scatter_single": 4 * MIB,
        },
        FEW[ON_FAST]: {"all_reduce": 16 * MIB, "broadcast": 4 * MIB},
    },
    "MPICH": {
        2: {
            "all_reduce": 16 * KIB,
            "broadcast": 2 * MIB,
            "all_gather_single": NEVER,
            "reduce_scatter_single": 4 * MIB,
        },
        4: {
            "all_reduce": 1 * MIB,
            "broadcast": 16 * KIB,
            "all_gather_single": 16 * KIB,
            "reduce_scatter_single": 16 * MIB,
        },
        NODES[False]: {
            "all_reduce": 1 * MIB,
            "broadcast": 64 * KIB,
            "all_gather_single": 256 * KIB,
            "reduce_scatter_single": 1 * MIB,
        },
        NODES[True]: {
            "all_reduce": 1 * MIB,
            "broadcast": 256 * KIB,
            "all_gather_single": 16 * MIB,
            "reduce_scatter_single": 4 * MIB,
        },
        ON_FAST: {
            "all_reduce": NEVER,
            "broadcast": NEVER,
            "all_gather_single": NEVER,
            "reduce_scatter_single": NEVER,
        },
        FEW[ON_FAST]: {"all_reduce": 16 * MIB, "broadcast": 16 * MIB},
    },
    "Intel MPI": {
        2: {
            "all_reduce": 4 * MIB,
            "broadcast": NEVER,
            "all_gather_single": NEVER,
            "reduce_scatter_single": 4 * MIB,
        },
        4: {
            "all_reduce": 16 * MIB,
            "broadcast": 1 * MIB,
            "all_gather_single": 4 * MIB,
            "reduce_scatter_single": 4 * MIB,
        },
    },
}

HALF_PART = 4  # half types from a quarter of it on: MPI would send them in float32
HALF_ON_FAST = 2 * MIB  # what they take the quarter of if nodes of one rank have a fast network or RDMA
MOST_OF_FEW = 4  # nodes of one rank: more exchange no long messages, and their chain is too long for small broadcasts
MOST_NODES = 32  # more were not measured; beyond, only all_reduce goes on, and reduces across nodes by MPI
# Beyond so many nodes, smaller shares are left to MPI, because every node sends one to every other. Measured at 100
# Mbit/s: all_reduce on 18 nodes of 2 ranks takes 1.2 times as long as with MPI between the nodes if shares have 29 KiB,
# 0.7 times with 116 KiB; reduce_scatter on 32 nodes of 2 ranks 3.1 times as long as MPI's with 16 KiB, 0.7 with 64 KiB
FEW_NODES, LEAST_SHARE = 16, 64 * KIB
MOST_RANKS = 256  # the blocks of so many share a slot of the window

# MPI has no half types: the alternative is to widen, reduce and round, which doubles what MPI moves
HALF_BYTES = 16 * KIB


def number_of_bytes(text: str) -> int | None:
    """Return what a size such as 4, 64K or 16M stands for, None if it is no size."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    digits = text[:-1] if unit else text
    return int(digits) * UNITS[unit] if unit in UNITS and digits.isdigit() else None


def override(text: str) -> int | None:
    """Return what a setting says of every collective; None if it says nothing, or names a file.

    Raises:
        ValueError: neither a number of bytes, nor "off", nor a file's name.
    """
    if not text or Path(text).suffix == ".json":
        return None
    if text.lower() == "off":
        return NEVER
    if (nbytes := number_of_bytes(text)) is None:
        raise ValueError(
            f'{VARIABLE}={text!r}; expected a number of bytes such as 65536, 64K or 4M, "off", or the .json file that '
            "`python -m hpcdist bench crossover` wrote"
        )
    return max(1, nbytes)  # nothing at all needs no memory to travel through


@cache
def read(path: str) -> Measured:
    """Read what was measured on a machine; null stands for never.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(Path(path).read_text())
        return {
            library: {
                place if place in NODES.values() else int(place): {
                    name: NEVER if nbytes is None else int(nbytes) for name, nbytes in by_name.items()
                }
                for place, by_name in by_place.items()
            }
            for library, by_place in content.items()
        }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{VARIABLE}={path!r}: {error}; expected the file that `python -m hpcdist bench crossover` wrote"
        ) from error


def text_of(measured: Measured) -> str:
    """Return what a file holds that says this."""
    content = {
        library: {
            str(place): {name: None if nbytes == NEVER else nbytes for name, nbytes in by_name.items()}
            for place, by_name in by_place.items()
        }
        for library, by_place in measured.items()
    }
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def write(path: str, library: str, place: int | str, found: dict[str, int]) -> None:
    """Add what was measured to a file, in place of what it said of the same number of ranks or kind of nodes."""
    known = read(path) if Path(path).exists() else {}
    Path(path).write_text(text_of({**known, library: {**known.get(library, {}), place: found}}))
    read.cache_clear()


class Thresholds:
    """What one setting says about every collective.

    Args:
        text: as ``HPCDIST_SHM`` holds it; empty for the table above.

    Raises:
        ValueError: the setting means nothing, or its file cannot be read.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text
        self._everywhere = override(text)
        self._table = read(text) if text and self._everywhere is None else BYTES

    @classmethod
    def from_environment(cls) -> Thresholds:
        """Return what the environment of this process says."""
        return cls(os.environ.get(VARIABLE, "").strip())

    def fingerprint(self) -> str:
        """Return what must be the same on all ranks: the number of bytes, or what the file holds."""
        if self._everywhere is not None:
            return "off" if self._everywhere == NEVER else f"{self._everywhere} bytes"
        return "the table of this version" if self._table is BYTES else text_of(self._table)

    def _told(self, library: str) -> Iterator[dict[int | str, dict[str, int]]]:
        """Yield what is known of a library: the setting's file first, a similar library last."""
        yield from (self._table.get(library, {}), BYTES.get(library, {}), BYTES[STAND_IN])

    def measured(self, library: str, size: int) -> dict[str, int]:
        """Return what was measured for a library with the number of ranks that comes nearest, by ratio."""
        by_ranks = next(
            found
            for told in self._told(library)
            if (found := {ranks: rows for ranks, rows in told.items() if isinstance(ranks, int)})
        )
        return by_ranks[min(by_ranks, key=lambda ranks: max(ranks / size, size / ranks))]

    def of(
        self, name: str, dtype: torch.dtype, op: str | None, nodes: int, ranks: int, library: str, network: Network
    ) -> int:
        """Return from how many bytes on hpcdist carries a collective out itself; ``NEVER`` if it does not.

        Args:
            name: the row's name, such as "all_reduce".
            dtype: the tensors' dtype.
            op: the reduction's name, None if nothing is reduced.
            nodes: that the ranks are on; if it is 0, the least for any number of nodes and any network.
            ranks: of the group.
            library: name of the MPI library as ``mpi4py.MPI.get_vendor`` gives it.
            network: between nodes of one rank.
        """
        if ranks == 1 or op == "PREMUL_SUM" or (op is not None and dtype not in DTYPES):
            return NEVER
        is_half = op is not None and dtype in WIDER
        found = []
        if nodes <= 1:
            found.append(self._within(name, is_half, ranks, library))
        if nodes != 1:
            found.append(self._across(name, is_half, nodes, ranks, library, network))
        return min(found)

    def _within(self, name: str, is_half: bool, ranks: int, library: str) -> int:
        table = self.measured(library, ranks)
        if name not in table:
            return NEVER
        if self._everywhere is not None:
            return self._everywhere
        return HALF_BYTES if is_half else table[name]

    def _across(self, name: str, is_half: bool, nodes: int, ranks: int, library: str, network: Network) -> int:
        is_flat = nodes == ranks
        too_many = nodes > MOST_NODES and (is_flat or name != "all_reduce")
        if too_many or (ranks > MOST_RANKS and name != "all_reduce") or name not in BYTES[STAND_IN][ON_FAST]:
            return NEVER
        if self._everywhere is not None:
            return self._everywhere
        kinds = [kind for each, kind in NODES.items() if nodes == 0 or each == is_flat]
        least = min(self._between(kind, name, is_half, nodes, library, network) for kind in kinds)
        if least == NEVER:
            return NEVER
        if nodes > FEW_NODES and name != "all_reduce":  # that one has MPI reduce small shares
            least = max(least, ranks * LEAST_SHARE)
        return least // HALF_PART if is_half else least

    def _between(self, kind: str, name: str, is_half: bool, nodes: int, library: str, network: Network) -> int:
        """Return what is known of a kind of nodes; the setting's file holds for any network."""
        own = {} if self._table is BYTES else self._table.get(library, {})
        if kind in own:
            return own[kind].get(name, NEVER)
        if kind == NODES[True] and network > Network.SLOW:
            if is_half:
                return HALF_ON_FAST
            if network is Network.RDMA:
                return NEVER
            kind = ON_FAST
        few = [FEW[kind]] if kind in FEW and (nodes == 0 or 2 < nodes <= MOST_OF_FEW) else []
        rows = (told.get(each, {}) for told in self._told(library) for each in (*few, kind))
        return next(row[name] for row in rows if name in row)
