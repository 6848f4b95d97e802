"""Fingerprints of calls: at the debug level DETAIL, they show whether all ranks call the same collective.

Before each collective the ranks gather a description of the call from every rank. If they do not agree, every rank
raises an error that names the ranks that differ and how.
"""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.core.backend import Backend
from hpcdist.core.call import Call
from hpcdist.core.group import Group, label
from hpcdist.core.printing import add_hint
from hpcdist.core.ranks import format_ranks, ranks_by_value
from hpcdist.core.reduction import name_of
from hpcdist.core.table import EXCHANGES, scale

Fingerprint = dict[str, Any]  # the description of a rank's call, by the names that the error uses
CALL = "Op type"
# compared among ranks that call the same collective; counts are compared by pairs of ranks
COMPARED = ("Sequence number", "Tensor sizes", "Tensor dtypes", "Tensor device types", "Reduce op", "Root rank")


def of_call(pg: Group, call: Call | str) -> Fingerprint:
    """Return the fingerprint of a call of this rank."""
    number = pg.journal.sequence + 1
    if isinstance(call, str):
        return {"Sequence number": number, CALL: call}
    row, tensor, counts = call.row, call.tensor, call.counts
    found = {"Sequence number": number, CALL: row.name, "Root rank": call.root}
    if tensor is None:
        return found
    if counts is None and row in EXCHANGES:  # the shares are equal
        counts = [call.send.numel() // pg.size()] * pg.size(), [call.recv.numel() // pg.size()] * pg.size()
    if tensor.is_complex() and not row.reduces:  # moved as its parts, which another rank may have given
        tensor = torch.view_as_real(tensor)
        counts = counts and scale(counts, 2)
    # only the root of a scatter sends: the other ranks receive one share of it
    elements = None if counts is not None else tensor.numel() * (1 if call.send is not None else pg.size())
    return found | {
        "Tensor shape": list(tensor.shape),
        "Tensor sizes": elements,
        "Tensor dtypes": str(tensor.dtype),
        "Tensor device types": tensor.device.type,
        "Reduce op": name_of(call.op) if row.reduces else None,
        "Counts": None if counts is None else (list(counts[0]), list(counts[1])),
    }


def check(pg: Group, backend: Backend, call: Call | str) -> None:
    """Compare a call (a name for one that moves objects) with the other ranks' before it runs; every rank calls this.

    RuntimeError, c10d's class for it, if they do not fit.
    """
    backend.settle()
    mine = of_call(pg, call)
    what, tensor, root = (call, None, None) if isinstance(call, str) else (call.row, call.tensor, call.root)
    shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
    with pg.journal.blocking((pg.journal, mine["Sequence number"], what, shape, dtype, root)):
        prints = backend.objects.all_gather(mine)
    differences = compare(prints) or compare_counts(prints)
    if differences:
        raise RuntimeError(message(pg, prints, differences))


def compare(prints: list[Fingerprint]) -> dict[str, dict[str, list[int]]]:
    """Return, by aspect, which ranks have which value, if they differ; only the calls' names if these differ."""
    values = {name: ranks_by_value(str(each.get(name)) for each in prints) for name in (CALL, *COMPARED)}
    found = {name: ranks for name, ranks in values.items() if len(ranks) > 1}
    return {CALL: found[CALL]} if CALL in found else found


def compare_counts(prints: list[Fingerprint]) -> dict[str, dict[str, list[int]]]:
    """Return the pairs of ranks that disagree about a share in a call with counts."""
    counts = [each["Counts"] for each in prints if each.get("Counts") is not None]
    if prints[0].get("Counts") is None:
        return {}
    if prints[0][CALL] in {row.name for row in EXCHANGES}:
        values = {}
        for sender, (sent, _) in enumerate(counts):
            for receiver, (given, (_, received)) in enumerate(zip(sent, counts, strict=True)):
                if given != (expected := received[sender]):
                    text = f"rank {sender} sends {given} elements to rank {receiver}, which expects {expected}"
                    values[text] = sorted({sender, receiver})
        return {"Counts": values} if values else {}
    side = 1 if prints[0][CALL] == "all_gather" else 0
    listings = ranks_by_value(str(each[side]) for each in counts)
    return {"Counts": listings} if len(listings) > 1 else {}


def text_of(each: Fingerprint) -> str:
    """Return a fingerprint as c10d writes one."""
    values = (f"{name.title().replace(' ', '')}={value}" for name, value in each.items() if value is not None)
    return f"CollectiveFingerPrint({', '.join(values)})"


def message(pg: Group, prints: list[Fingerprint], differences: dict[str, dict[str, list[int]]]) -> str:
    """Return the error's text: c10d's sentence, then for each aspect the ranks of each value."""
    own, mine = pg.rank(), prints[pg.rank()]
    others = [rank for rank, each in enumerate(prints) if each != mine]
    other = next((rank for rank in others if prints[rank][CALL] != mine[CALL]), next(iter(others), own))
    lines = [
        f"Detected mismatch between collectives on ranks of {label(pg)}. "
        f"Rank {own} is running collective: {text_of(mine)}, but Rank {other} is running collective: "
        f"{text_of(prints[other])}. Collectives differ in the following aspects:"
    ]
    for name, values in differences.items():
        ways = "; ".join(f"{format_ranks(ranks)}: {value}" for value, ranks in values.items())
        lines.append(f"    {name}: {ways}")
    return add_hint("\n".join(lines), "mismatch")
