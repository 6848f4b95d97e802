"""Reproducible sums: ``reproducible`` and HPCDIST_REPRODUCIBLE, by which reductions repeat bit for bit."""

from __future__ import annotations

import os
from types import TracebackType

from hpcdist.core import hooks
from hpcdist.core.agreement import check_same
from hpcdist.core.reproducible import EXACTLY, IN_ORDER
from hpcdist.core.world import WORLD

VARIABLE = "HPCDIST_REPRODUCIBLE"  # 1: in rank order; exact: whatever the number of ranks
MODES = {"0": None, "1": IN_ORDER, "exact": EXACTLY}


class Reproduction:
    """What ``reproducible`` has set; as a context manager it brings back what was before."""

    def __init__(self, mode: str | None) -> None:
        self._before = hooks.reproducible
        switch(mode)

    def __enter__(self) -> Reproduction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            switch(self._before)
        else:
            hooks.reproducible = self._before  # the others may not come to compare


def reproducible(is_on: bool = True, *, exact: bool = False) -> Reproduction:
    """Make floating-point reductions on CPU tensors give the same bits each time, from now on or for a ``with`` block.

    The result then depends only on the ranks' values and their order, not on the size of a message, buckets,
    thresholds, the MPI library, nodes or asynchronous calls. Each element is combined in rank order; half types are
    combined in float32 and rounded once. With ``exact`` a sum is computed without rounding and rounded once, so that
    the order of the ranks does not matter either, nor among how many ranks the same terms are spread (terms that a rank
    has added up by itself were rounded there). It covers SUM, AVG and
    PREMUL_SUM of all groups and of torch.distributed's calls on them; PRODUCT is combined in rank order in both forms.
    Every rank of the default group calls this, in the same order among its collectives (a collective itself, if there
    is a default group). HPCDIST_REPRODUCIBLE=1 or =exact sets it for a whole job.

    Args:
        is_on: False for the libraries' own sums again, which are faster.
        exact: sums without rounding errors, which take many times as long.

    Returns:
        A context manager, which at its end brings back what was before. It needs not be entered.

    Raises:
        DistBackendError: the ranks differ in it; on every rank.
    """
    return Reproduction(None if not is_on else EXACTLY if exact else IN_ORDER)


def switch(mode: str | None) -> None:
    """Set how reductions are carried out, once the ranks have found that they agree."""
    before, hooks.reproducible = hooks.reproducible, mode
    default = WORLD.default
    if default is None or default.cpu is None or default.size() == 1:
        return
    default.cpu.settle()
    try:
        check_same(default.cpu, {"hpcdist.reproducible": str(mode)}, "reproducible")
    except BaseException:
        hooks.reproducible = before
        raise


def mode_of_environment() -> str | None:
    """Return what HPCDIST_REPRODUCIBLE chooses.

    Raises:
        ValueError: another value than 0, 1 and exact.
    """
    given = os.environ.get(VARIABLE, "0")
    if given not in MODES:
        raise ValueError(f"{VARIABLE}={given!r}: expected one of {', '.join(MODES)}")
    return MODES[given]


def set_from_environment() -> None:
    """Take HPCDIST_REPRODUCIBLE, if nothing else was chosen.

    Raises:
        ValueError: as ``mode_of_environment``.
    """
    if hooks.reproducible is None:
        hooks.reproducible = mode_of_environment()
