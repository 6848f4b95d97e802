"""Escalation of the calls under way in this process: which are overdue, who asks about them, how their waits end.

    RUNNING --past the limit--> DUE --its turn--> ASKING --answers--> ENDING
                                 |^--a lower rank asks--|                ^
                                 +------another rank's report------------+

A wait is ended in several ways, the gentlest first. Each one that takes effect gets some time; if the call is still
under way after it, the next one follows. The last one aborts the job.

Nothing here reads a clock or asks a rank: the watchdog gives the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcdist.core.errors import DistBackendError
from hpcdist.watch.calls_under_way import UnderWay
from hpcdist.watch.liveness import NEWS_SECONDS

YIELD_SECONDS = 1.5  # how long a rank leaves it to the one that reported to end a call for all
STUCK_SECONDS = 2.5  # how long a call that was made to raise may take for it
AGAIN_SECONDS = 0.3  # to the second try, before the abort: a thread without a core may be about to wait, or done
NO_THREAD = -1  # of a call in the background, where no receive blocks

Attempt = Callable[..., bool]  # calls a function with arguments, and tells whether it took effect; it does not raise


def end_in_background(each: UnderWay, reason: str, is_reported: bool, attempt: Attempt) -> bool:
    """Have the wait for a queued call raise, or end what a device is at, at once; False if neither goes on any more.

    A worker's thread stays in its call. ``is_reported`` says whether another rank has reported the call, and ends it.
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
        # revoked here too: the reporter's revocation does not reach a communicator that it is not in
        attempt(faults.interrupt, reason, NO_THREAD)
    return True


def end_blocked(
    each: UnderWay, reason: str, is_reported: bool, attempt: Attempt, abort: Callable[[str], object]
) -> Iterator[float]:
    """End a call that blocks a thread, one way after the other; yield the seconds that each one gets.

    ``is_reported`` as above.
    """
    backend, faults = each.backend, each.backend.faults
    # a receive whose message has begun to come may not be cancelled (MPI 3.8.4), and its sender may be stopped
    if (work := each.work) is not None and attempt(work._interrupt, reason):
        yield STUCK_SECONDS
    if backend.ends_waits:  # the library raises by itself
        return
    if is_reported:  # its revocation ends the call on all ranks under ULFM
        attempt(faults.set_revoke_reason, reason)
        yield NEWS_SECONDS if faults.interrupts_all() else YIELD_SECONDS
    if not (was_interrupted := attempt(faults.interrupt, reason, each.thread)):
        yield AGAIN_SECONDS
        was_interrupted = attempt(faults.interrupt, reason, each.thread)
    if was_interrupted:
        # Open MPI's revocation does not end a send that shared memory holds back, to a rank that takes nothing
        yield STUCK_SECONDS
    stuck, cannot = "a call that was interrupted has not ended", "MPI or NCCL cannot be taken out of a blocking call"
    abort(f"the job is aborted: {stuck if was_interrupted else cannot}")
