"""Fingerprints of calls: the check, at the debug level DETAIL, that all ranks call the same collective.

Before each collective the ranks gather a description of the call from every rank. If they do not agree, every rank
raises an error that names the ranks that differ and how.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hpcdist.core.backend import Backend
from hpcdist.core.call import Call
from hpcdist.core.errors import explained
from hpcdist.core.group import Group
from hpcdist.core.ranks import by_value, listed
from hpcdist.core.reduction import name_of
from hpcdist.core.table import EXCHANGES, scaled
from hpcdist.watch.report import label


class Fingerprint(NamedTuple):
    """What a rank's call looks like to the others."""

    call: str
    number: int
    shape: tuple[int, ...] | None = None  # of the tensor sent, or received where none is
    elements: int | None = None  # that must be equal on all ranks
    dtype: str | None = None
    device: str | None = None
    op: str | None = None
    root: int | None = None
    counts: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        parts = [f"SequenceNumber={self.number}", f"OpType={self.call.upper()}"]
        if self.shape is not None:
            parts.append(f"TensorShape={list(self.shape)}, TensorDtypes={self.dtype}, TensorDevice={self.device}")
        if self.op is not None:
            parts.append(f"Op={self.op}")
        if self.root is not None:
            parts.append(f"Root={self.root}")
        if self.counts is not None:
            parts.append(f"Counts={self.counts}")
        return f"CollectiveFingerPrint({', '.join(parts)})"


# what is compared, and how the error calls it; tensors only among ranks that call the same collective
ASPECTS = {
    "call": "Op type",
    "number": "Sequence number",
    "elements": "Tensor sizes",
    "dtype": "Tensor dtypes",
    "device": "Tensor device types",
    "op": "Reduce op",
    "root": "Root rank",
}


def of_call(pg: Group, call: Call | str) -> Fingerprint:
    """Return the fingerprint of a call of this rank."""
    number = pg.journal.sequence + 1
    if isinstance(call, str):
        return Fingerprint(call, number)
    row, tensor = call.row, call.tensor
    if tensor is None:
        return Fingerprint(row.name, number, root=call.root)
    counts = call.counts
    if counts is None and row in EXCHANGES:  # the shares are equal
        counts = [call.send.numel() // pg.size()] * pg.size(), [call.recv.numel() // pg.size()] * pg.size()
    if tensor.is_complex() and not row.reduces:  # moved as its real and imaginary parts, which another rank may give
        tensor = torch.view_as_real(tensor)
        counts = counts and scaled(counts, 2)
    # only the root of a scatter sends: the other ranks receive one share of it
    elements = None if counts is not None else tensor.numel() * (1 if call.send is not None else pg.size())
    return Fingerprint(
        row.name,
        number,
        tuple(tensor.shape),
        elements,
        str(tensor.dtype),
        tensor.device.type,
        name_of(call.op) if row.reduces else None,
        call.root,
        None if counts is None else (tuple(counts[0]), tuple(counts[1])),
    )


def check(pg: Group, backend: Backend, call: Call | str) -> None:
    """Compare a call (a name for one that moves objects) with the other ranks' before it runs; every rank calls this.

    RuntimeError, c10d's class for it, if they do not fit.
    """
    backend.settle()
    mine = of_call(pg, call)
    tensor = None if isinstance(call, str) else call.tensor
    what, dtype = call if isinstance(call, str) else call.row, None if tensor is None else tensor.dtype
    with pg.journal.blocking((pg.journal, mine.number, what, mine.shape, dtype, mine.root)):
        prints = [Fingerprint(*each) for each in backend.objects.all_gather(tuple(mine))]
    differences = compare(prints) or compare_counts(prints)
    if differences:
        raise RuntimeError(message(pg, prints, differences))


def compare(prints: list[Fingerprint]) -> dict[str, dict[str, list[int]]]:
    """Return by aspect which ranks have which value, where they differ."""
    values = {name: by_value(str(getattr(each, aspect)) for each in prints) for aspect, name in ASPECTS.items()}
    found = {name: ranks for name, ranks in values.items() if len(ranks) > 1}
    call = ASPECTS["call"]
    return {call: found[call]} if call in found else found  # what follows cannot be equal then


def compare_counts(prints: list[Fingerprint]) -> dict[str, dict[str, list[int]]]:
    """Return which ranks disagree about the share of each rank in a call with counts."""
    if prints[0].counts is None:
        return {}
    if prints[0].call in {row.name for row in EXCHANGES}:
        counts = [each.counts for each in prints if each.counts is not None]
        values = {}
        for sender, (sent, _) in enumerate(counts):
            for receiver, (given, (_, received)) in enumerate(zip(sent, counts, strict=True)):
                if given != (expected := received[sender]):
                    text = f"rank {sender} sends {given} elements to rank {receiver}, which expects {expected}"
                    values[text] = sorted({sender, receiver})
        return {"Counts": values} if values else {}
    side = 1 if prints[0].call == "all_gather" else 0
    listings = by_value(str(list(each.counts[side])) for each in prints if each.counts is not None)
    return {"Counts": listings} if len(listings) > 1 else {}


def message(pg: Group, prints: list[Fingerprint], differences: dict[str, dict[str, list[int]]]) -> str:
    """Return the error's text: c10d's sentence, then for each aspect which ranks have what."""
    mine = prints[pg.rank()]
    differing = (r for part in (1, None) for r, each in enumerate(prints) if each[:part] != mine[:part])
    other = next(differing, pg.rank())
    lines = [
        f"Detected mismatch between collectives on ranks of {label(pg.group_name, pg.group_desc)}. "
        f"Rank {pg.rank()} is running collective: {mine}, but Rank {other} is running collective: {prints[other]}. "
        "Collectives differ in the following aspects:"
    ]
    for name, values in differences.items():
        ways = "; ".join(f"{listed(ranks)}: {value}" for value, ranks in values.items())
        lines.append(f"    {name}: {ways}")
    return explained("\n".join(lines), "mismatch")
