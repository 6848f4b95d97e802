"""Words of a call: two numbers by which ranks compare a collective, because equal calls have equal words.

The first word encodes the call's kind (row, dtype, op, root), its size, and its number modulo 2^16. A size that does
not fit, or that only one rank knows, is in the second word.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hpcdist.core.call import Call
from hpcdist.core.reduction import ALL_OPS, NAMES, name_of
from hpcdist.core.table import ALL_REDUCE, ALL_TO_ALL_SINGLE, EXCHANGES, ROWS, Counts, Shape, scale

# The bits of a word, from the lowest: the number, the size, the root, the op, the dtype, and 5 for the call; 63 in all.
NUMBER_BITS, SIZE_BITS, ROOT_BITS, OP_BITS, DTYPE_BITS = 16, 17, 15, 4, 6
NUMBER = (1 << NUMBER_BITS) - 1
SIZES = (1 << SIZE_BITS) - 1  # sizes below fit into the word
WIDE = SIZES << NUMBER_BITS  # in place of the size, which is in the second word
ROOT = 1 << NUMBER_BITS + SIZE_BITS
COUNTED = 1 << 48  # from here on a size is a hash of counts; below zero, counts that only one rank knows

LEAVE, SPLIT = "destroy_process_group", "new_group"
OBJECTS = ("all_gather_object", "gather_object", "broadcast_object", "scatter_object")
# the user's calls that gather objects from all ranks: their index is in the word in place of a root
GATHERS = (
    OBJECTS[0], "init_process_group", "new_subgroups", "reproducible", "profile", "Window", "Window.close",
    "node_shared", "open_store", "start_debug_server", SPLIT, f"{SPLIT} with another backend",
)  # fmt: skip
STOP = "stop"  # not a call: an earlier one has failed
LEFT = -1 << 63  # sign of a word: an exception has ended the call in its middle, so that no other rank takes part
# the user's calls that consist of others: they are compared before the first of those, and do nothing themselves
COMPOSED = (
    "all_gather_varied", "reduce_scatter_varied", "all_to_all_varied", "sparse all_reduce",
    *(f"reproducible {row}" for row in ROWS.values() if row.reduces),
)  # fmt: skip
CALLS = ("", *ROWS, *OBJECTS, SPLIT, LEAVE, STOP, *COMPOSED)
CODES = {name: code for code, name in enumerate(CALLS)} | {
    row.name: CALLS.index("all_to_all_single") for row in EXCHANGES
}
DTYPES = (None, *sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str))
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
OPS = ("", *(NAMES[op] for op in ALL_OPS))


class DecodedCall(NamedTuple):
    """A call, decoded from its words."""

    name: str
    dtype: torch.dtype | None
    op: str
    root: int
    size: int  # elements for each rank; from COUNTED on, or below zero: counts
    was_left: bool = False  # whether its rank has left it in its middle

    def __str__(self) -> str:
        text = GATHERS[self.root] if self.name == OBJECTS[0] else self.name
        kind = self.name.rpartition(" ")[2]
        if self.dtype is not None:
            each = "" if kind in ("all_reduce", "reduce", "broadcast") else " a rank"
            elements = f"{self.size} elements{each}" if 0 <= self.size < COUNTED else "elements by counts"
            text += f" of {elements}, {str(self.dtype).removeprefix('torch.')}"
        if self.op:
            text += f", {self.op}"
        if self.name == ALL_REDUCE.name and self.root:
            text += f", of several tensors (their sizes have the digest {self.root})"
        row = ROWS.get(kind)
        if self.name in OBJECTS[1:] or (row is not None and row.rooted):
            text += f", root {self.root}"
        return f"{text}, which an exception has ended in its middle" if self.was_left else text


def kind_word(name: str, dtype: torch.dtype | None = None, op: Any = None, root: int | None = None) -> int:
    """Return the first word of a call, without size and number."""
    if dtype is not None and op is None and dtype.is_complex:
        dtype = dtype.to_real()  # moved as its parts, which another rank may have given
    code = CODES[name] << DTYPE_BITS | DTYPE_CODES[dtype]
    code = code << OP_BITS | (0 if op is None else OPS.index(name_of(op)))
    return (code << ROOT_BITS | (root or 0) & ((1 << ROOT_BITS) - 1)) * ROOT


def with_root(word: int, call: Call) -> int:
    """Return the first word of a call with its root, or with a hash of the sizes of the tensors that it reduces."""
    if call.root is not None:
        return word + call.root * ROOT
    if call.counts is not None and call.row is ALL_REDUCE:
        return word + (1 + hash(tuple(call.counts[0])) % ((1 << ROOT_BITS) - 1)) * ROOT
    return word


def with_size(word: int, size: int) -> int:
    """Return the first word of a call with its size, or with ``WIDE``."""
    return word | (size << NUMBER_BITS if 0 <= size < SIZES else WIDE)


def is_wide(word: int) -> bool:
    """Tell whether the size of a call is in its second word."""
    return word & WIDE == WIDE


def read(word: int, size: int) -> DecodedCall:
    if not is_wide(word):
        size = (word & WIDE) >> NUMBER_BITS
    code = (word & ~LEFT) // ROOT
    root, code = code & ((1 << ROOT_BITS) - 1), code >> ROOT_BITS
    op, code = code & ((1 << OP_BITS) - 1), code >> OP_BITS
    return DecodedCall(CALLS[code >> DTYPE_BITS], DTYPES[code & ((1 << DTYPE_BITS) - 1)], OPS[op], root, size, word < 0)


def size_of(call: Call, rank: int, ranks: int) -> int:
    """Return the second word of a call: the elements of a rank's share, or of the tensor if all ranks get all of it."""
    row, send, recv, _, _, counts, *_ = call
    if counts is not None and row.shape is not Shape.SAME:
        sent, received = scale(counts, _parts(call))
        if row not in EXCHANGES:
            return COUNTED + (hash(tuple(sent if row.reduces else received)) & (COUNTED - 1))
        if len({*sent, *received}) > 1:
            return -1 - rank  # different from all other ranks' words: pairs of ranks compare these
        return received[0]
    if row.buffers == 0:
        return 0
    whole, divided = (recv, send) if row.shape is Shape.GATHER else (send, recv)
    if row.shape in (Shape.GATHER, Shape.SCATTER):
        share = divided.numel() if divided is not None else whole.numel() // ranks
    else:
        share = send.numel() // ranks if row.shape is Shape.EXCHANGE else send.numel()
    return share * _parts(call)


def words_of(call: Call, rank: int, ranks: int) -> tuple[int, int]:
    """Return the words of a call, without its number."""
    size, tensor = size_of(call, rank, ranks), call.tensor
    kind = kind_word(call.row.name, None if tensor is None else tensor.dtype, call.op)
    return with_size(with_root(kind, call), size), size


def counts_of(call: Call) -> Counts | None:
    """Return the counts of a call, in the elements of ``size_of``."""
    return call.counts and scale(call.counts, _parts(call))


def _parts(call: Call) -> int:
    """Return how many elements one counts for: a complex one is moved as two, which another rank may have given."""
    return 2 if call.op is None and call.tensor.dtype.is_complex else 1


def is_one(word: int, size: int, other_word: int, other_size: int) -> bool:
    """Tell whether the calls of two ranks may match; their shares for each other are not known."""
    if (word ^ other_word) & ~WIDE or size == other_size:
        return word == other_word
    return min(size, other_size) < 0 and read(word, size).name == ALL_TO_ALL_SINGLE.name
