"""Agreement of ranks: on settings, which are compared once, at init, and on whether a step has failed on one of them.

Environment variables and files may differ from node to node. Ranks with different settings would make different calls
and wait for each other forever, so a difference is an error on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hpcdist.core.backend import Backend
from hpcdist.core.errors import DistBackendError, MismatchError
from hpcdist.core.printing import add_hint
from hpcdist.core.ranks import format_ranks, ranks_by_value

T = TypeVar("T")
CALLERS_MISTAKES: dict[str, type[Exception]] = {each.__name__: each for each in (TypeError, ValueError, MismatchError)}
SHOWN = 60  # characters of a value that the message shows


def check_same(backend: Backend, settings: dict[str, str], call: str = "init_process_group") -> None:
    """Raise on every rank if a setting is not the same on all of them; every rank of the group calls.

    One all_gather of 32 bytes of each rank; only a difference costs more. Of objects, because the setting that is
    compared may decide how tensors travel: ranks whose ``HPCDIST_SHM`` is 16 bytes or less share even such small ones.
    The DistBackendError names the user's call, the setting, its values, and the ranks that have each.
    """
    digest = hashlib.sha256(repr(sorted(settings.items())).encode()).digest()
    if len(set(backend.objects.all_gather(digest, call=call))) == 1:
        return
    everyone = backend.objects.all_gather(settings, call=call)
    differences = []
    for name in settings:
        ranks = ranks_by_value(found.get(name, "not known") for found in everyone)
        if len(ranks) > 1:
            values = [f"{value[:SHOWN]!r} on {format_ranks(those)}" for value, those in ranks.items()]
            differences.append(f"{name} is {' and '.join(values)}")
    text = (
        f"{call}: ranks have different settings, and would make different calls. {'; '.join(differences)}. "
        "Set the same on every rank (mpirun -x NAME, srun --export=ALL)"
    )
    raise DistBackendError(add_hint(text, "settings-differ"))


def check_subgroup(backend: Backend, mine: Sequence[int] | None, call: str) -> None:
    """Raise on every rank if one of a subgroup's ranks gave another subgroup; every rank of the backend's group calls.

    ``mine`` is the subgroup that this rank gave for itself, None if it is in no subgroup. ``call`` is the user's.
    """
    gather = partial(backend.objects.all_gather, call=call)
    digests = gather(None if mine is None else hashlib.sha256(repr(list(mine)).encode()).digest())
    fits = mine is None or all(digests[rank] == digests[backend.rank] for rank in mine)
    if not all(gather(fits)):
        raise subgroups_differ(gather(mine))


def subgroups_differ(given: Sequence[Sequence[int] | None]) -> MismatchError:
    """Return the error of ranks whose subgroups contradict each other; it shows what each rank gave."""
    pairs = ((rank, other) for rank, mine in enumerate(given) for other in mine or () if given[other] != mine)
    rank, other = next(pairs)
    return MismatchError(lists_differ(rank, given[rank], other, given[other]))


def lists_differ(rank: int, mine: Sequence[int] | None, other: int, theirs: Sequence[int] | None) -> str:
    """Return the message for two ranks that gave different lists for a group of which both are members."""
    first, second = (None if ranks is None else list(ranks) for ranks in (mine, theirs))
    text = (
        f"new_group: rank {rank} gave the ranks {first}, and rank {other} gave {second}; expected one list, in one "
        "order, from all ranks that it names"
    )
    return add_hint(text, "subgroups-differ")


def attempt(backend: Backend, call: str, step: Callable[[], T]) -> list[T]:
    """Run a function on every rank and return the results of all, pickled; if it failed on one, raise the same on all.

    Every rank of the backend's group calls, with the user's call for the message. A TypeError or ValueError of the
    lowest rank on which it failed stays one; anything else is a DistBackendError. A rank that was interrupted in the
    step raises KeyboardInterrupt itself.
    """
    value, failure = None, None
    try:
        value = step()
    except BaseException as error:
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = backend.objects.all_gather((value, text), call=call)
    if failure is not None and not isinstance(failure, Exception):
        raise failure
    for rank, (_, text) in enumerate(outcomes):
        if text:
            kind = CALLERS_MISTAKES.get(text.partition(":")[0], DistBackendError)
            raise kind(f"{call} failed on rank {rank} of the group: {text}") from failure
    return [value for value, _ in outcomes]
