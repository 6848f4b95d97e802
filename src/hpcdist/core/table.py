"""Table of collectives: their names in torch, MPI and NCCL, and the shapes of their buffers.

mpi4py and nccl4py take arguments in the same order (send, receive, op, root), so one row describes the call to both. A
new collective is one row here, one public function in ``hpcdist.c10d`` and one row of expected values in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

Counts = tuple[Sequence[int], Sequence[int]]  # elements sent to and received from each rank
EACH: Counts = ([], [])  # marks an all_reduce of a list, which reduces each of its tensors in place


def scale(counts: Counts, parts: int) -> tuple[list[int], list[int]]:
    """Return counts of elements as counts of their parts, ``parts`` for each element."""
    return [parts * each for each in counts[0]], [parts * each for each in counts[1]]


class Shape(Enum):
    """How many elements are received for those sent, among n ranks."""

    NONE = "no buffers"
    SAME = "receive as many as sent"
    GATHER = "receive n times what is sent"
    SCATTER = "send n times what is received"
    EXCHANGE = "receive as many as sent, a multiple of n"
    COUNTED = "each rank's share is given by counts"


# whether the elements sent and received fit among n ranks; counted shares are compared with their counts instead
FITS: dict[Shape, Callable[[int, int, int], bool]] = {
    Shape.NONE: lambda sent, received, n: True,
    Shape.SAME: lambda sent, received, n: received == sent,
    Shape.GATHER: lambda sent, received, n: received == sent * n,
    Shape.SCATTER: lambda sent, received, n: sent == received * n,
    Shape.EXCHANGE: lambda sent, received, n: received == sent and sent % n == 0,
    Shape.COUNTED: lambda sent, received, n: False,
}


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """One collective: its names in the three libraries and the shape of its call."""

    name: str
    mpi: str  # the blocking method; the non-blocking one is "I" + lower case
    nccl: str | None
    buffers: int
    shape: Shape
    reduces: bool = False
    rooted: bool = False
    fits: Callable[[int, int, int], bool] = field(init=False)  # its shape's test, found without a look-up
    is_in_place: bool = field(init=False)  # whether one tensor may be both input and output

    def __post_init__(self) -> None:
        object.__setattr__(self, "fits", FITS[self.shape])
        object.__setattr__(self, "is_in_place", self.shape is Shape.SAME)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name.upper()  # its name in this module


BARRIER = Row("barrier", "Barrier", None, 0, Shape.NONE)
BROADCAST = Row("broadcast", "Bcast", "broadcast", 1, Shape.SAME, rooted=True)
ALL_REDUCE = Row("all_reduce", "Allreduce", "all_reduce", 2, Shape.SAME, reduces=True)
REDUCE = Row("reduce", "Reduce", "reduce", 2, Shape.SAME, reduces=True, rooted=True)
ALL_GATHER_SINGLE = Row("all_gather_single", "Allgather", "all_gather", 2, Shape.GATHER)
ALL_GATHER = Row("all_gather", "Allgatherv", None, 2, Shape.GATHER)  # or of shares by counts
GATHER = Row("gather", "Gatherv", "gather", 2, Shape.GATHER, rooted=True)
SCATTER = Row("scatter", "Scatterv", "scatter", 2, Shape.SCATTER, rooted=True)
REDUCE_SCATTER_SINGLE = Row(
    "reduce_scatter_single", "Reduce_scatter_block", "reduce_scatter", 2, Shape.SCATTER, reduces=True
)
REDUCE_SCATTER = Row("reduce_scatter", "Reduce_scatter", None, 2, Shape.COUNTED, reduces=True)
# One rank may give splits while another gives none, so both rows, with counts and without, are one call of a library
ALL_TO_ALL_SINGLE = Row("all_to_all_single", "Alltoallw", None, 2, Shape.EXCHANGE)
ALL_TO_ALL = Row("all_to_all", "Alltoallw", None, 2, Shape.COUNTED)
EXCHANGES = frozenset({ALL_TO_ALL_SINGLE, ALL_TO_ALL})

ROWS = {each.name: each for each in list(globals().values()) if isinstance(each, Row)}


# c10d's collectives as methods of a group, with the name of each in earlier versions of torch and in C++
METHODS: dict[str, str | None] = {
    "allreduce": None,
    "allreduce_coalesced": None,
    "reduce": None,
    "reduce_scatter": None,
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "broadcast": None,
    "allgather": None,
    "allgather_coalesced": None,
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "gather": None,
    "gather_single": "gather_into_tensor",
    "scatter": None,
    "alltoall": None,
    "all_to_all_single": "alltoall_base",
    "barrier": None,
}
MESSAGE_METHODS = ("send", "recv", "recv_anysource")
