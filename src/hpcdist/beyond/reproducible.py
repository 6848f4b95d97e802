"""Reproducible sums: ``reproducible`` and HPCDIST_REPRODUCIBLE make reductions repeat bit for bit."""

from __future__ import annotations

from types import TracebackType

from hpcdist.core import hooks
from hpcdist.core.agreement import check_same
from hpcdist.core.world import WORLD


class Reproduction:
    """The setting of ``reproducible``; as a context manager it restores the previous one."""

    def __init__(self, is_on: bool) -> None:
        self._before = hooks.reproducible
        switch(is_on)

    def __enter__(self) -> Reproduction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:  # otherwise the other ranks may not come to compare
                switch(self._before)
        finally:
            hooks.reproducible = self._before


def reproducible(is_on: bool = True) -> Reproduction:
    """Make floating-point reductions on CPU tensors give the same bits each time, from now on or for a ``with`` block.

    The result then depends only on the ranks' values and their order, not on the size of a message, buckets,
    thresholds, the MPI library, nodes or asynchronous calls. Each element is combined in rank order; half types are
    combined in float32 and rounded once. It covers SUM, AVG, PREMUL_SUM and PRODUCT of all groups and of
    torch.distributed's calls on them. Every rank of the default group calls this, in the same order among its
    collectives (a collective itself, if there is a default group). HPCDIST_REPRODUCIBLE=1 sets it for a whole job.

    Args:
        is_on: False to return to the libraries' own sums, which are faster.

    Returns:
        A context manager, which restores the previous setting at its end. It need not be entered.

    Raises:
        DistBackendError: the ranks differ in it; on every rank.
    """
    return Reproduction(is_on)


def switch(is_on: bool) -> None:
    """Switch, after the ranks have compared the new setting."""
    before, hooks.reproducible = hooks.reproducible, is_on
    default = WORLD.default
    if default is None or default.cpu is None or default.size() == 1:
        return
    try:
        with default.during("reproducible"):
            check_same(default.cpu, {"hpcdist.reproducible": str(is_on)}, "reproducible")
    except BaseException:
        hooks.reproducible = before
        raise
