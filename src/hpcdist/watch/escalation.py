"""Escalation of overdue calls in this process: which rank asks about them, and how their waits end.

    RUNNING --past the limit--> DUE --its turn--> ASKING --answers--> ENDING
                                 |^--a lower rank asks--|                ^
                                 +------another rank's report------------+

There are several ways to end a wait, tried in order. Each one that takes effect gets some time; if the call is still
under way then, the next one follows. The last one aborts the job.

This module reads no clock and asks no rank: the watchdog passes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcdist.core.errors import DistBackendError
from hpcdist.watch.calls_under_way import UnderWay
from hpcdist.watch.liveness import NEWS_SECONDS

YIELD_SECONDS = 1.5  # seconds that a rank leaves to the reporting rank to end a call for all
STUCK_SECONDS = 2.5  # seconds that a call may take to raise
AGAIN_SECONDS = 0.3  # to the second try, before the abort: a thread without a core may be about to wait, or done
NO_THREAD = -1  # the same for a call in the background, where no receive blocks

Attempt = Callable[..., bool]  # calls a function with arguments, and tells whether it took effect; does not raise


def end_in_background(each: UnderWay, reason: str, is_reported: bool, attempt: Attempt) -> bool:
    """Let the wait for a queued call raise, or end a device's call, at once; False if neither is under way any more.

    A worker's thread stays in its call. ``is_reported``: another rank has reported the call, and ends it.
    """
    backend, faults = each.backend, each.backend.faults
    if (work := each.work) is None:
        return False
    if backend.queue is None or backend.queue.running is not work:
        attempt(faults.interrupt, reason, NO_THREAD)
        return True
    if is_reported:
        attempt(faults.set_revoke_reason, reason)
    elif not backend.ends_waits:
        attempt(faults.interrupt, reason, NO_THREAD)
    attempt(backend.queue.fail, DistBackendError(reason))
    if is_reported and faults.interrupts_all():
        # revoked here too: the reporter may not be a member of this communicator
        attempt(faults.interrupt, reason, NO_THREAD)
    return True


def end_blocked(
    each: UnderWay, reason: str, is_reported: bool, attempt: Attempt, abort: Callable[[str], object]
) -> Iterator[float]:
    """End a call that blocks a thread, in one way after the other; yield the seconds that each one gets.

    ``is_reported`` as above.
    """
    backend, faults = each.backend, each.backend.faults
    # a receive whose message has begun to arrive may not be cancellable (MPI 3.8.4), and its sender may be stopped
    if (work := each.work) is not None and attempt(work._interrupt, reason):
        yield STUCK_SECONDS
    if backend.ends_waits:  # the library raises by itself
        return
    if is_reported:  # under ULFM the reporter's revocation ends the call on all ranks
        attempt(faults.set_revoke_reason, reason)
        yield NEWS_SECONDS if faults.interrupts_all() else YIELD_SECONDS
    if not (was_interrupted := attempt(faults.interrupt, reason, each.thread)):
        yield AGAIN_SECONDS
        was_interrupted = attempt(faults.interrupt, reason, each.thread)
    if was_interrupted:
        # Open MPI's revocation does not end a send that waits in shared memory for a rank that does not receive
        yield STUCK_SECONDS
    stuck, cannot = "a call that was interrupted has not ended", "MPI or NCCL cannot be taken out of a blocking call"
    abort(f"the job is aborted: {stuck if was_interrupted else cannot}")
