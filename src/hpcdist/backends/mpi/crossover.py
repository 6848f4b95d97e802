"""Of how many bytes must a collective be to go through node-shared memory faster than through MPI itself?

That depends on the MPI library, the collective, the dtype, the number of ranks and the machine, so it is a table of
measurements: `python -m hpcdist bench --explain` prints what holds for the present run, and
`python -m hpcdist bench crossover` measures a machine's own and writes them to a file. `HPCDIST_SHM` overrides the
table: by the name of such a file; by a number of bytes (suffix K or M) from which every collective uses shared memory;
or by "off".

An entry lists the sizes at which the faster way changes, beginning with MPI: () is always MPI, (65536,) shared memory
from 64 KiB on, (16384, 524288) shared memory from 16 KiB to below 512 KiB. Bytes are those of the larger of the two
buffers. The table is what two machines agree on where they do, with 2 and 4 ranks (docs/explanation/performance.md).
An MPI library that was not measured gets the row of MPICH, whose algorithms most libraries inherit.
"""

from __future__ import annotations

import json
import os
import sys
from bisect import bisect_right
from functools import cache
from pathlib import Path

import torch

from hpcdist.backends.mpi.node_arithmetic import KINDS, WIDER
from hpcdist.core.table import Row, Shape

VARIABLE = "HPCDIST_SHM"
NODE_KEY_VARIABLE = "HPCDIST_NODE_KEY"
NEVER = sys.maxsize
KIB, MIB = 1 << 10, 1 << 20
STAND_IN = "MPICH"

Switches = tuple[int, ...]
Measured = dict[str, dict[int, dict[str, Switches]]]  # library -> ranks -> collective -> sizes

BYTES: Measured = {
    "Open MPI": {
        2: {
            "all_reduce": (16 * KIB,),
            "broadcast": (4 * MIB,),
            "all_gather_single": (),
            "reduce_scatter_single": (256 * KIB,),
        },
        4: {
            "all_reduce": (1 * MIB,),
            "broadcast": (16 * KIB,),
            "all_gather_single": (16 * KIB,),
            "reduce_scatter_single": (1 * MIB,),
        },
    },
    "MPICH": {
        2: {
            "all_reduce": (16 * KIB,),
            "broadcast": (2 * MIB,),
            "all_gather_single": (),
            "reduce_scatter_single": (4 * MIB,),
        },
        4: {
            "all_reduce": (1 * MIB,),
            "broadcast": (16 * KIB,),
            "all_gather_single": (16 * KIB,),
            "reduce_scatter_single": (16 * MIB,),
        },
    },
    "Intel MPI": {
        2: {
            "all_reduce": (4 * MIB,),
            "broadcast": (),
            "all_gather_single": (),
            "reduce_scatter_single": (4 * MIB,),
        },
        4: {
            "all_reduce": (16 * MIB,),
            "broadcast": (1 * MIB,),
            "all_gather_single": (4 * MIB,),
            "reduce_scatter_single": (4 * MIB,),
        },
    },
}

# MPI has no half types: the alternative is to widen, reduce and round, which doubles what MPI moves
HALF_BYTES = (16 * KIB,)
ACROSS_NODES = ("all_reduce",)  # the other collectives stay in one node


def setting() -> str:
    """Return what the environment sets in place of the table; empty where it sets nothing."""
    return os.environ.get(VARIABLE, "").strip()


def override(text: str) -> Switches | None:
    """Return what a setting says of every collective; None where it says nothing, or names a file.

    Raises:
        ValueError: neither a number of bytes, nor "off", nor a file's name.
    """
    if not text or Path(text).suffix == ".json":
        return None
    if text.lower() == "off":
        return ()
    digits, unit = (text[:-1], text[-1].lower()) if text[-1].lower() in "km" else (text, "")
    if not digits.isdigit():
        raise ValueError(
            f'{VARIABLE}={text!r}; expected a number of bytes such as 65536, 64K or 4M, "off", or the .json file that '
            "`python -m hpcdist bench crossover` wrote"
        )
    # nothing at all needs no memory to travel through
    return (max(1, int(digits) * {"": 1, "k": KIB, "m": MIB}[unit]),)


@cache
def read(path: str) -> Measured:
    """Read what was measured on a machine; the ranks of a job must all find the same.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(Path(path).read_text())
        return {
            library: {
                int(ranks): {name: tuple(sorted(map(int, sizes))) for name, sizes in by_name.items()}
                for ranks, by_name in by_ranks.items()
            }
            for library, by_ranks in content.items()
        }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{VARIABLE}={path!r}: {error}; expected the file that `python -m hpcdist bench crossover` wrote"
        ) from error


def write(path: str, library: str, ranks: int, found: dict[str, Switches]) -> None:
    """Add what was measured with some number of ranks to a file, in place of what it said of the same."""
    known = read(path) if Path(path).exists() else {}
    content = {**known, library: {**known.get(library, {}), ranks: found}}
    Path(path).write_text(json.dumps(content, indent=1) + "\n")
    read.cache_clear()


def measured(library: str, world_size: int, text: str) -> dict[str, Switches]:
    """Return what was measured for a library with the number of ranks that comes nearest, by ratio."""
    table = read(text) if text and override(text) is None else BYTES
    by_ranks = table.get(library) or BYTES.get(library) or BYTES[STAND_IN]
    nearest = min(by_ranks, key=lambda ranks: max(ranks / world_size, world_size / ranks))
    return by_ranks[nearest]


def node_key() -> str | None:
    """Return what stands for this rank's node where one machine imitates several, else None."""
    return os.environ.get(NODE_KEY_VARIABLE)


def floor_bytes(row: Row, world_size: int, library: str) -> int:
    """Return how many bytes a rank sends at least where a collective uses shared memory, whatever its dtype."""
    op = "SUM" if row.reduces else None
    lowest = [switches(row.name, dtype, op, world_size, library)[:1] for dtype in (torch.float32, torch.bfloat16)]
    least = min((first[0] for first in lowest if first), default=NEVER)
    return least if row.shape is not Shape.GATHER or least == NEVER else least // world_size


def switches(name: str, dtype: torch.dtype, op: str | None, world_size: int, library: str) -> Switches:
    """Return the sizes in bytes at which a collective changes between MPI, with which it begins, and shared memory.

    Args:
        name: the row's name, such as "all_reduce".
        dtype: the tensors' dtype.
        op: the reduction's name, None where nothing is reduced.
        world_size: ranks of the group.
        library: name of the MPI library as `mpi4py.MPI.get_vendor` gives it.
    """
    text = setting()
    table = measured(library, world_size, text)
    if world_size == 1 or name not in table or (op is not None and dtype not in KINDS) or op == "PREMUL_SUM":
        return ()
    chosen = override(text)
    if chosen is not None:
        return chosen
    return HALF_BYTES if op is not None and dtype in WIDER else table[name]


def is_shared(nbytes: int, at: Switches) -> bool:
    """Tell whether so many bytes go through shared memory."""
    return bisect_right(at, nbytes) % 2 == 1
