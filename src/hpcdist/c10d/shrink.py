"""``shrink_group``, a group without some of its ranks, and ``revoke_process_group``."""

from __future__ import annotations

from functools import partial
from typing import Any

from hpcdist.core import errors, factory, world
from hpcdist.core.factory import check_ranks
from hpcdist.core.group import Group
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.world import WORLD
from hpcdist.watch.logs import LOG
from hpcdist.watch.watchdog import RUNNING

SHRINK_DEFAULT = 0x00
SHRINK_ABORT = 0x01
FLAGS = {SHRINK_DEFAULT: "SHRINK_DEFAULT", SHRINK_ABORT: "SHRINK_ABORT"}


def shrink_group(
    ranks_to_exclude: list[int], group: Group | None = None, shrink_flags: int = SHRINK_DEFAULT, pg_options: Any = None
) -> ProcessGroup:
    """Make a group without some of the ranks, and end the old one; only the remaining ranks call this.

    Live ranks can be excluded under every MPI, dead ones if MPI survives them (ULFM). Shrinking the default
    group ends all other groups, because ranks get new numbers; the new one becomes the default group.

    Args:
        ranks_to_exclude: ranks of the group; the same list on all that call.
        group: the group; None for the default one.
        shrink_flags: ``SHRINK_ABORT`` makes calls under way on the group raise first, if MPI can do so.
        pg_options: accepted as in c10d, and ignored.

    Returns:
        The new group. A new default group numbers its ranks from 0, in the order they had.

    Raises:
        TypeError: not a list of integers, or a backend that cannot shrink.
        ValueError: an empty list, ranks out of range or given twice, all ranks, or unknown flags.
        RuntimeError: called by an excluded rank.
        DistBackendError: the library failed; for a dead rank if this MPI does not survive one.
    """
    old = world.resolve(group)
    excluded = check_arguments(ranks_to_exclude, shrink_flags, old)
    is_default = old is WORLD.default
    remaining = [global_rank for rank, global_rank in enumerate(old.ranks) if rank not in excluded]
    name = old.next_name(remaining)
    aborts = shrink_flags == SHRINK_ABORT
    with old.journal.during("shrink_group"):
        by_device = old.derive(lambda each: each.shrink(sorted(excluded), name, aborts))
    description = "default:shrunken" if is_default else f"{old.group_name}:shrunk"
    ranks = range(len(remaining)) if is_default else remaining
    gone = list(WORLD.groups.values()) if is_default else [old]

    def abort(each: Group) -> None:
        each.abort(f"group {each.group_name!r} was shrunk", ends_calls=False)

    try:
        errors.end_all(partial(abort, each) for each in gone)
    finally:
        for each in gone:
            WORLD.remove(each)
        if is_default:
            for watchdog in RUNNING:
                watchdog.renumber(remaining)
        device, config, limit = old.bound_device_id, old.config, old.timeout
        new = factory.make(ranks, by_device, config, name, description, limit, device, is_default=is_default)
    LOG.info("shrunk without ranks %s: %d ranks left", sorted(excluded), len(remaining), extra={"group": name})
    return new


def revoke_process_group(group: Group | None = None) -> None:
    """End all calls under way on a group, on all its ranks, with DistBackendError; any of them calls this.

    Later calls raise as well; ``shrink_group`` makes a usable group. All of a group's communicators are revoked: its
    own, the one for objects, those of its nodes and between them. Groups made from it are not affected. Without
    ULFM a rank cannot leave a blocked call: the job is aborted with a message.

    Args:
        group: the group; None for the default one.

    Raises:
        ValueError: before ``init_process_group``, or a destroyed group.

    Source: ULFM's MPI_Comm_revoke; ncclCommAbort, which ends only this rank's calls, for a group's NCCL.
    """
    pg = world.resolve(group)
    reason = f"group {pg.group_name!r} was revoked by its rank {pg.rank()} (revoke_process_group)"
    for each in dict.fromkeys(pg.backends.values()):
        if each.faults.revoke(reason) or (each is not pg.cpu and each.faults.interrupt(reason)) or pg.size() == 1:
            continue
        for watchdog in RUNNING:
            watchdog.abort(each, f"{reason}: without ULFM nothing ends the calls of other ranks; the job is aborted")


def failed_ranks(group: Group | None = None) -> list[int]:
    """Return the ranks of a group that are known to have died, as ranks of the group, for ``shrink_group``.

    The source is MPI on this rank (ULFM's MPI_Comm_get_failed); empty if MPI does not survive a dead rank.

    Raises:
        ValueError: before ``init_process_group``, or a destroyed group.
    """
    pg = world.resolve(group)
    return sorted({rank for each in pg.backends.values() for rank in each.faults.failed()})


def check_arguments(ranks_to_exclude: Any, shrink_flags: Any, group: Group) -> set[int]:
    """Return the ranks to exclude, checked; raises c10d's errors."""
    if not isinstance(ranks_to_exclude, list):
        raise TypeError(
            f"ranks_to_exclude must be a list, but got {type(ranks_to_exclude).__name__}. Example: [1, 3, 5]"
        )
    if not ranks_to_exclude:
        raise ValueError("ranks_to_exclude cannot be empty: at least one rank must be given. Example: [1]")
    if not isinstance(shrink_flags, int) or shrink_flags not in FLAGS:
        known = ", ".join(f"{name} ({value})" for value, name in FLAGS.items())
        raise ValueError(f"Invalid shrink_flags value: {shrink_flags}. Must be one of: {known}")
    size = group.size()
    if size <= 1:
        raise ValueError(f"Cannot shrink a process group with size {size}: it must have at least 2 ranks")
    excluded = set(check_ranks(ranks_to_exclude, True, size))
    if len(excluded) == size:
        raise ValueError(f"Cannot exclude all {size} ranks from process group: at least one must remain")
    if group.rank() in excluded:
        raise RuntimeError(
            f"Current rank {group.rank()} is in the exclusion list and should not call shrink_group(): "
            "only the ranks that remain call it, the others end"
        )
    return excluded
