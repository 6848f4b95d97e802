"""Decision of a meeting: how an elastic job continues, given the reports of its living processes.

Every process decides by itself, from the same reports, so that all decide the same.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

from hpcdist.core.ranks import format_ranks


class Status(IntEnum):
    """Why a process comes to a meeting; a spare's does not count."""

    BEGINS = 0  # the steps begin
    FAILED = 1  # in a step
    AGAIN = 2  # the last meeting has failed
    FINISHED = 3  # all steps
    LEFT = 4  # the loop, and cannot come back to it


class Report(NamedTuple):
    """What a process sends at a meeting; int64 each."""

    id: int  # its rank in the job as it was started
    status: int
    epoch: int  # how many meetings it has seen go well
    size: int  # ids of the default group that it knows
    step: int  # the number of steps that its state contains; -1 for a spare without a state
    made: int  # how many groups were made
    changes: int  # of members
    recent: int  # changes within the last hour


class Decision(NamedTuple):
    """The decision that follows from the reports; the same on all processes."""

    ends: bool  # whether the job does
    epoch: int
    members: list[int]  # ids of the ranks that continue, in order
    lost: list[int]  # ranks of the last default group
    source: int  # the rank whose state the others take over
    changes: int
    present: list[int]  # ids of all living processes
    remakes: bool  # whether the default group is made again
    reason: str = ""  # why the job cannot continue; empty if it does, or ends


def count_rivals(living: Collection[int], missing: Collection[int]) -> int:
    """Return how many other processes may continue without the living ones; 0 if they cannot.

    Of two parts of a job that cannot reach each other only the larger continues, of two halves the one with the lowest
    id. ``missing`` are the ids of the other processes of the last meeting, without those that are known to have ended.
    """
    is_larger = len(living) > len(missing)
    is_first_half = len(living) == len(missing) and min(living) < min(missing)
    return 0 if is_larger or is_first_half else len(missing)


def decide(reports: list[Report], members: list[int], min_size: int, most: int, rivals: int = 0) -> Decision:
    """Decide how a job continues, given the reports of all living processes and the ids of the default group so far.

    ``most`` is the limit of changes of members in an hour; ``rivals`` is the number of other processes that may
    continue without these.
    """
    by_id = {report.id: report for report in reports}
    lost = [rank for rank, each in enumerate(members) if each not in by_id]
    survivors = [by_id[each] for each in members if each in by_id]
    statuses = {Status(report.status) for report in survivors}
    # first those that have got the state in a meeting that failed
    waiting = iter(sorted(by_id.keys() - set(members), key=lambda each: (-by_id[each].step, each)))
    filled = [each if each in by_id else next(waiting, None) for each in members]
    chosen = [each for each in filled if each is not None]
    has_ended = bool(statuses) and statuses <= {Status.FINISHED, Status.LEFT}
    if has_ended:
        chosen = [report.id for report in survivors]
    farthest = max((by_id[each] for each in chosen), key=lambda report: report.step, default=None)
    changes = max(report.changes for report in reports) + bool(lost)
    reason = ""
    if not has_ended:
        if rivals:
            reason = f"{len(reports)} processes are left here, and {rivals} that they cannot reach may go on"
        elif farthest is None or farthest.step < 0:
            reason = f"all {len(members)} ranks of the job have died, and its state with them"
        elif len(chosen) < min_size:
            left = f"{len(chosen)} are left, fewer than min_size={min_size}"
            reason = f"{format_ranks(lost)} of {len(members)} died and {left}"
        elif lost and max(report.recent for report in reports) >= most:
            reason = (
                f"{format_ranks(lost)} died after {most} other changes within an hour (max_changes_per_hour={most})"
            )
        elif Status.LEFT in statuses:
            reason = "a rank has left the loop over the steps and others have not; use stop() on all ranks to end it"
        elif not lost and Status.FAILED in statuses and not statuses & {Status.AGAIN, Status.BEGINS}:
            reason = "a step has failed though no rank was lost; see the error of the rank where it did"
    return Decision(
        has_ended,
        max(report.epoch for report in reports) + 1,
        chosen,
        lost,
        0 if farthest is None else chosen.index(farthest.id),
        changes,
        sorted(by_id),
        not reason and (bool(lost) or bool(statuses & {Status.FAILED, Status.AGAIN})),
        f"the elastic job cannot go on: {reason}" if reason else "",
    )
