"""Thresholds: the sizes in bytes from which a collective goes through the memory of the nodes, in place of MPI alone.

One table of measurements, by library, ranks on the node, collective and class of the dtype. It has a row only if
from its size on hpcdist wins, or loses at most 5 %, on each processor that was measured: a Xeon, an EPYC whose ranks
share an L3 cache, and one whose ranks do not. Between two L3 caches a line that its writer still holds takes 25 ns, so
that two ranks lose a factor of 3 to 5 by a broadcast through the window, which wins a factor of 2 within one. Several
nodes with equally many ranks have rows of their own, as do nodes of one rank; if nodes have different numbers of ranks,
MPI alone is used. ``python -m hpcdist bench --explain`` prints the thresholds of the present run.

The file that ``python -m hpcdist tune`` writes takes the table's place (``threshold_file``), and ``HPCDIST_SHM`` that
of both: the name of such a file, a number of bytes (suffix K or M) for every collective, or "off".

Bytes are those of the larger of the two buffers. An MPI library that was not measured gets the rows of MPICH, whose
algorithms most libraries inherit, and a number of ranks those of the nearest number, by ratio.

All ranks of a group must have the same thresholds, because ranks in the window and ranks in MPI would wait for each
other. So rank 0 of the default group reads them, once, and sends them to the others, and every group made from it
inherits them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from hpcdist.backends.mpi.node import threshold_file
from hpcdist.backends.mpi.node.arithmetic import DTYPES, WIDER
from hpcdist.backends.mpi.node.threshold_file import FLAT, NEVER, SEVERAL, VARIABLE, Measured

if TYPE_CHECKING:
    from mpi4py import MPI

PROCESSORS = ("AMD EPYC", "Intel(R) Xeon(R)")  # beginnings of the names of the measured libraries
KIB, MIB = 1 << 10, 1 << 20
UNITS = {"": 1, "K": KIB, "M": MIB, "G": 1 << 30}
STAND_IN = "MPICH"
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single")
# reductions; a table without this row does not apply to them. MIN and MAX of all floats too: MPI gets copies of both
HALF = " of half types"

HALF_ROWS = {"all_reduce of half types": 48 * KIB, "reduce_scatter_single of half types": 48 * KIB}
HALF_BETWEEN = {"all_reduce of half types": 256 * KIB, "reduce_scatter_single of half types": 256 * KIB}

BYTES: Measured = {
    ("Open MPI", 2): {"all_reduce": 64 * MIB, "reduce_scatter_single": 1 * MIB},
    ("Open MPI", 4): {
        "all_reduce": 1 * MIB,
        "broadcast": 128 * KIB,
        "all_gather_single": 128 * KIB,
        "reduce_scatter_single": 1 * MIB,
    },
    ("Open MPI", SEVERAL): {
        "all_reduce": 1 * MIB,
        "broadcast": 256 * KIB,
        "all_gather_single": 1 * MIB,
        "reduce_scatter_single": 2 * MIB,
    },
    ("MPICH", 2): {"all_reduce": 64 * MIB, "reduce_scatter_single": 64 * MIB, **HALF_ROWS},
    ("MPICH", 4): {
        "all_reduce": 1 * MIB,
        "broadcast": 16 * KIB,
        "all_gather_single": 16 * KIB,
        "reduce_scatter_single": 16 * MIB,
        **HALF_ROWS,
    },
    ("MPICH", SEVERAL): {
        "all_reduce": 1 * MIB,
        "all_gather_single": 256 * KIB,
        "reduce_scatter_single": 1 * MIB,
        **HALF_BETWEEN,
    },
    ("MPICH", FLAT): HALF_BETWEEN,
    ("Intel MPI", 2): {"all_reduce": 4 * MIB, "reduce_scatter_single": 4 * MIB},
    ("Intel MPI", 4): {
        "all_reduce": 16 * MIB,
        "broadcast": 1 * MIB,
        "all_gather_single": 4 * MIB,
        "reduce_scatter_single": 4 * MIB,
    },
}

# Between nodes smaller blocks, and shares of half types, are MPI's: each goes to every other node. On 32 nodes of 2
# ranks at 100 Mbit/s a reduce_scatter took 3.1 times as long as MPI's with blocks of 16 KiB, 0.7 times with 64 KiB
LEAST_BLOCK = 64 * KIB


def number_of_bytes(text: str) -> int | None:
    """Return the bytes of a size such as 4, 64K or 16M, None if it is not a size."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    digits = text[:-1] if unit else text
    return int(digits) * UNITS[unit] if unit in UNITS and digits.isdecimal() else None


def override(text: str) -> int | None:
    """Return a setting's threshold for every collective; None if it is empty, or names a file.

    ValueError if it is neither a number of bytes, nor "off", nor a file's name.
    """
    if not text or threshold_file.is_file(text):
        return None
    if text.lower() == "off":
        return NEVER
    if (nbytes := number_of_bytes(text)) is None:
        raise ValueError(
            f'{VARIABLE}={text!r}; expected a number of bytes such as 65536, 64K or 4M, "off", or the .json file that '
            "`python -m hpcdist tune` wrote"
        )
    return max(1, nbytes)  # an empty message needs no memory


def ratio(a: int, b: int) -> float:
    return max(a / b, b / a)


class Thresholds:
    """The thresholds of every collective under one setting: a value of ``HPCDIST_SHM``, or empty for the table above.

    ``measured`` are the rows of the file at ``path``, if there is one, for this processor; they replace the table. An
    invalid setting is a ValueError.
    """

    def __init__(self, text: str = "", path: str = "", measured: Measured | None = None) -> None:
        self.text = text
        self.path = path
        self._everywhere = override(text)
        self._table = measured or BYTES

    @classmethod
    def of_rank_0(cls, comm: MPI.Intracomm) -> Thresholds:
        """Return rank 0's thresholds, of its environment and files, or raise ValueError on all ranks; all call."""
        found = comm.bcast(threshold_file.find() if comm.Get_rank() == 0 else None)
        if isinstance(found, ValueError):
            raise found
        return cls(*found)

    def rows(self, library: str, place: int | str) -> Iterator[dict[str, int]]:
        """Yield the rows of a place, or those of the nearest number of ranks, by ratio.

        First from the file, then from the table of this version, then of the library that replaces it.
        """
        for table, each in ((self._table, library), (BYTES, library), (BYTES, STAND_IN)):
            known = [at for of, at in table if of == each]
            if isinstance(place, int) and (counts := [at for at in known if isinstance(at, int)]):
                yield table[each, min(counts, key=partial(ratio, place))]
            elif place in known:
                yield table[each, place]

    def of(
        self, name: str, dtype: torch.dtype, op: str | None, nodes: int, ranks_per_node: int, ranks: int, library: str
    ) -> int:
        """Return the bytes from which a collective goes through the memory of the nodes; ``NEVER`` if it does not.

        Row, op and library are names (``mpi4py.MPI.get_vendor``). With ``nodes`` 0 it is the least for any number of
        nodes; ``ranks_per_node`` is 0 if several nodes have different numbers.
        """
        if ranks == 1 or name not in COLLECTIVES or op == "PREMUL_SUM" or (op is not None and dtype not in DTYPES):
            return NEVER
        places: list[int | str]
        if nodes == 0:
            places = [ranks, SEVERAL, FLAT]
        elif nodes == 1:
            places = [ranks]
        else:
            places = [] if ranks_per_node == 0 else [FLAT if ranks_per_node == 1 else SEVERAL]
        is_half = op is not None and (dtype in WIDER or (op in ("MIN", "MAX") and dtype.is_floating_point))
        least_between = 0
        if name.endswith("_single") or op in ("MIN", "MAX") or (op is not None and dtype.itemsize < 4) or is_half:
            least_between = ranks * LEAST_BLOCK  # sends a block from each node to each other node
        return min((self._at(place, name, is_half, least_between, library) for place in places), default=NEVER)

    def _at(self, place: int | str, name: str, is_half: bool, least_between: int, library: str) -> int:
        if place == FLAT and not is_half:
            return NEVER
        if self._everywhere is not None:
            return self._everywhere
        if not is_half:
            least = next(self.rows(library, place)).get(name, NEVER)
        else:
            least = next((found[name + HALF] for found in self.rows(library, place) if name + HALF in found), NEVER)
        return least if isinstance(place, int) else max(least, least_between)
