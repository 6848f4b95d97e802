"""Elastic jobs: training that continues when ranks die, with spare ranks in their places, or with fewer ranks.

If MPI survives a dead process (ULFM), all processes of the job, workers and spares, share a communicator besides the
default group's. A rank that gets an error revokes it and its groups, so that all ranks come to a *meeting*: the living
ranks make a communicator (MPI_Comm_shrink), each sends the last step that its state contains, the default group is made
again, and all take the state of the rank with the latest step. Then they agree (MPI_Comm_agree) that all of this
succeeded; if not, because another rank has died, they meet again. A job's end is a meeting too, since a rank that has
finished may be needed by others that lost one in the last step. Steps without a failure cost no communication.

Fenix and the "shrink and restore" programs of the ULFM papers do the same (Gamell et al., SC 2014; Bland et al., 2013).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from traceback import format_exception
from types import TracebackType
from typing import Any

import torch

from hpcdist.beyond.membership import Decision, Report, Status, count_rivals, decide
from hpcdist.beyond.snapshot import Snapshot, Stateful
from hpcdist.c10d.lifecycle import destroy_process_group, init_process_group, make_default_group
from hpcdist.core import registry
from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.call import Call
from hpcdist.core.errors import DistBackendError
from hpcdist.core.group import Group
from hpcdist.core.ranks import as_int, format_ranks
from hpcdist.core.table import ALL_GATHER_SINGLE, BROADCAST
from hpcdist.core.waiting import wait_until
from hpcdist.core.world import WORLD, default_group
from hpcdist.watch.job_end import Meeting
from hpcdist.watch.liveness import ProofOfDeath
from hpcdist.watch.logs import LOG
from hpcdist.watch.watchdog import RUNNING

HOUR = 3600.0
CANNOT_SURVIVE = (
    "this job ends when a rank dies: its MPI does not survive that. Start it with Open MPI 5 and "
    "`mpirun --with-ft ulfm`"
)
FORM_LEAST = 300.0  # seconds that a new default group may take, like the first one; a short timeout is meant for calls
LOOK_SECONDS = 0.005  # seconds between two polls of a waiting spare


class ElasticJob:
    """A job that continues when ranks die; ``elastic`` makes it.

    Attributes:
        rank: this process's rank in the default group; None for a spare that is not used.
        size: the number of ranks of the default group.
        changes: how often a rank was replaced or given up.
        survives: whether this MPI survives a dead process.
    """

    def __init__(self, spares: int, min_size: int, max_changes_per_hour: int) -> None:
        self._spares, self._min_size = as_int(spares, "spares"), as_int(min_size, "min_size")
        self._most = as_int(max_changes_per_hour, "max_changes_per_hour")
        self.rank: int | None = None
        self.size = self.changes = 0
        self._agreed_changes = 0
        self.survives = False
        self._everyone: Any = None  # a Backend: the communicator of all processes, workers and spares
        self._members: list[int] = []  # ids of the default group's ranks, in order
        self._id = self._epoch = 0
        self._started = 0  # the number of processes that were started
        self._present: list[int] = []  # ids of the processes at the last meeting, by their rank in ``_everyone``
        self._proof: ProofOfDeath | None = None  # if no launcher reports deaths
        self._changed: list[float] = []  # the times of changes of the members
        self._snapshot = Snapshot({})
        self._setup: Callable[[], object] | None = None
        self._holds = False  # whether the snapshot was taken in this job
        self._has_ended = self._is_shown = False
        self._error: BaseException | None = None  # of the step or meeting that failed
        self._done = self._every = 0  # the number of the next step, and of steps between snapshots
        self._stops = self._has_entered = False  # whether this step is the last, and was entered

    # -- what a program calls --------------------------------------------------------------------------

    def __enter__(self) -> ElasticJob:
        if WORLD.default is None:
            init_process_group()
        default = default_group()
        everyone, size = default.any_backend(), default.size()
        if not 0 <= self._spares < size or not 1 <= self._min_size <= size - self._spares:
            raise ValueError(
                f"elastic(spares={self._spares}, min_size={self._min_size}) does not fit a job of {size} ranks: "
                f"expected 0 <= spares < {size} and 1 <= min_size <= {size} - spares"
            )
        if self._spares and everyone.name != "mpi":
            raise ValueError(f"spares need MPI, and this job's backend is {default.config!r}")
        self.survives = everyone.name == "mpi" and everyone.faults.interrupts_all()
        self._config, self._timeout, self._device = default.config, default.timeout, default.bound_device_id
        self._carriers = {device: each.name for device, each in default.backends.items()}
        self._is_shown = WORLD.mirror is not None
        self._id, self._members, self._started = default.rank(), list(range(size - self._spares)), size
        self.size = len(self._members)
        self.rank = self._id if self._id < self.size else None
        if self._id == 0 and size > 1 and not self.survives:
            warnings.warn(CANNOT_SURVIVE, RuntimeWarning, stacklevel=2)
        self._present, own = list(range(size)), None
        if self.survives or self._spares:
            with default.journal.during("elastic"):
                self._everyone = everyone.split([list(range(size))], ["elastic"], self._timeout)
                everyone.objects.all_gather(None)  # on the old one: no rank may revoke the new one before all have it
                if self.survives and everyone.membership is not None and everyone.membership.leave_launcher():
                    self._proof = ProofOfDeath(RUNNING[0].channel)
                if self._spares:
                    own = everyone.split([self._members], ["elastic"], self._timeout)
        if self._spares:
            made = WORLD.made
            destroy_process_group()
            WORLD.made = made
            if own is not None:
                self._form(own)
        return self

    def steps(
        self,
        state: Mapping[str, Stateful] | Stateful,
        stop: int,
        *,
        start: int = 0,
        setup: Callable[[], object] | None = None,
        snapshot_every: int = 1,
    ) -> Iterator[AbstractContextManager[int]]:
        """Yield the steps of the job, each run inside ``with``; every process calls this, spares too.

        A spare waits here until it replaces a dead rank, or the job ends. Before the first step, and after each change,
        all ranks take the state of one of them, and ``setup`` is called on all. A failed step is repeated by all ranks
        from the same state: a failure costs that step, or, with ``snapshot_every``, as many steps. The data of a step
        should depend only on its number, the rank and the number of ranks.

        Args:
            state: the state that steps change, the same on all ranks: an object with ``state_dict`` and
                ``load_state_dict``, or a dict of such objects. It is copied after a step, to return to it.
            stop: the number after the last step's.
            start: the number of the first step.
            setup: makes the objects that depend on the ranks, such as groups, meshes and a DDP module.
            snapshot_every: the number of steps between copies of the state.

        Yields:
            ``with step as number:`` gives the step's number, and handles errors of lost ranks.

        Raises:
            TypeError: a state without these methods, or a number that is not an integer.
            ValueError: an invalid number.
            DistBackendError: fewer ranks than ``min_size`` are left, too many changes in an hour, the only rank with
                the state was lost, or a step has failed although no rank was lost; on every process.
        """
        start, stop = as_int(start, "start"), as_int(stop, "stop")
        if (snapshot_every := as_int(snapshot_every, "snapshot_every")) < 1 or not 0 <= start <= stop:
            raise ValueError(
                f"expected snapshot_every >= 1 and 0 <= start <= stop; got {snapshot_every}, {start}, {stop}"
            )
        named = state if isinstance(state, Mapping) else {"state": state}
        for name, each in named.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(
                    f"steps: {name!r} of type {type(each).__name__} has no state_dict and load_state_dict; expected a "
                    "module, an optimizer or the like itself, or a dict of such objects"
                )
        self._snapshot = Snapshot(named)
        self._setup, self._every, self._stops = setup, snapshot_every, False
        self._snapshot.take(start)
        self._done, self._holds = start, self.rank is not None
        goes_on = self._come(Status.BEGINS)
        while goes_on:
            if self._error is not None:
                goes_on = self._come(Status.FAILED)
            elif self._stops or self._done >= stop:
                goes_on = self._come(Status.FINISHED)
            else:
                self._has_entered = False
                yield self._step()
                if not self._has_entered:
                    raise RuntimeError("a step of an elastic job is made inside `with`: for step in …: with step as n:")

    def stop(self) -> None:
        """Let ``steps`` end after this step; every rank calls it in the same one."""
        self._stops = True

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            if self._proof is not None and not self._has_ended:  # no other message tells the others
                for watchdog in RUNNING:
                    trace = "".join(format_exception(error))
                    watchdog.abort(self._everyone, f"a rank has left the job by {error!r}; the job is aborted\n{trace}")
            elif self.survives:
                self._everyone.faults.revoke("a rank has left the job by an error")  # the spares come and see it leave
            return
        if not self._has_ended:
            self._come(Status.LEFT)
        if WORLD.default is None:
            return
        if is_hit():
            clear("a rank died when the job had ended")
        else:
            destroy_process_group()

    # -- steps -----------------------------------------------------------------------------------------

    @contextmanager
    def _step(self) -> Iterator[int]:
        """Run a step: yield its number, handle errors of lost ranks, and copy the state after success."""
        self._has_entered = True
        try:
            yield self._done
        except RuntimeError as error:  # torch's C++ turns ours into this class
            if not self.survives or not (isinstance(error, DistBackendError) or is_hit()):
                raise
            self._error = error.with_traceback(None)
            LOG.info("step %d failed: %s", self._done, error)
            return
        self._done += 1
        if self.survives and (self._done - self._snapshot.step) % self._every == 0:
            self._snapshot.take(self._done)

    # -- meetings --------------------------------------------------------------------------------------

    def _come(self, status: Status) -> bool:
        """Come to a meeting, a spare until it is used; tell whether the job continues."""
        if not self.survives:
            return self._come_without_ulfm(status)
        while True:
            if self._meet(status):
                self._has_ended = True
                return False
            if self.rank is not None:
                return True
            status = Status.AGAIN
            wait_until(lambda: self._everyone.faults.is_revoked() or self._is_deserted(), longest=LOOK_SECONDS)

    def _is_deserted(self) -> bool:
        """Tell whether a spare has lost all ranks, so that no other process can call a meeting."""
        return {self._present[each] for each in self._everyone.faults.failed()} >= set(self._members)

    def _come_without_ulfm(self, status: Status) -> bool:
        """Start or end without ULFM: rank 0 sends a message to the spares."""
        word = torch.zeros(1, device="cpu")
        if self.rank is None:
            end = self._everyone.irecv(word, 0, 0, None)
            wait_until(end.is_completed, longest=LOOK_SECONDS)
        elif status is Status.BEGINS:
            self._take_over(default_group(), 0)
            return True
        if self.rank == 0:
            for spare in range(self.size, self.size + self._spares):
                self._everyone.send(word, spare, 0)
        self._has_ended = True
        return False

    def _meet(self, status: Status) -> bool:
        """Meet until a meeting succeeds on all; tell whether the job ends, or raise its error on every process."""
        had_failed, size = False, 0
        while True:
            if status in (Status.FAILED, Status.AGAIN):
                revoke_groups("a rank of the job has failed")
            self._everyone.faults.revoke("a rank of the job has called a meeting")
            with self._waiting():
                self._everyone = everyone = self._everyone.membership.survivors()
            if had_failed and everyone.size == size:
                raise DistBackendError("the elastic job cannot go on, though no more ranks were lost") from self._error
            size = everyone.size
            found = self._agreed(self._confer, status)
            if found is not None and self._agreed(self._carry_out, *found) is not None:
                return self._commit(found[0])
            had_failed = True
            if status not in (Status.FINISHED, Status.LEFT):
                status = Status.AGAIN

    def _agreed(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """Carry out a part of a meeting; return its result, or None if it failed on any process."""
        result = None
        try:
            # the rest calls on the default group, which the watchdog knows, and runs the program's own code
            with self._waiting() if part == self._confer else nullcontext():
                result = part(*arguments)
        except RuntimeError as error:
            if not isinstance(error, DistBackendError) and not is_hit() and not self._everyone.faults.is_revoked():
                raise
            LOG.info("a meeting failed: %s", error)
            self._error = error
            self._everyone.faults.revoke("a rank of the job has failed in a meeting")
            if part == self._carry_out:  # in a meeting a process makes no calls on them, and may need no others
                revoke_groups("a rank of the job has failed in a meeting")
        with self._waiting():
            return result if self._everyone.membership.agree(result is not None) else None

    def _confer(self, status: Status) -> tuple[Decision, Backend | None, int]:
        """Exchange reports, and decide how the job continues; return the decision and the number of groups made.

        The second result is the communicator of a new default group, if there is one and this process is in it.
        """
        everyone = self._everyone
        mine = Report(
            self._id, status, self._epoch, len(self._members), self._snapshot.step if self._holds else -1,
            WORLD.made, self._agreed_changes,
            sum(time.monotonic() - each < HOUR for each in self._changed),
        )  # fmt: skip
        gathered = torch.empty(everyone.size * len(mine), dtype=torch.int64, device="cpu")
        everyone.run(Call(ALL_GATHER_SINGLE, torch.tensor(mine, device="cpu"), gathered))
        reports = [Report(*each) for each in gathered.view(-1, len(mine)).tolist()]
        # a process may not know that the last meeting succeeded; another one does
        newest = max(range(everyone.size), key=lambda rank: reports[rank].epoch)
        ids = [report.id for report in reports]
        facts = torch.zeros(reports[newest].size + 1, dtype=torch.int64, device="cpu")
        if newest == everyone.rank:
            facts = torch.tensor([self._rivals(ids), *self._members], device="cpu")
        everyone.run(Call(BROADCAST, facts, facts, root=newest))
        rivals, *members = facts.tolist()
        decision = decide(reports, members, self._min_size, self._most, rivals)
        own = None
        if decision.remakes:
            places = {each: rank for rank, each in enumerate(ids)}
            own = everyone.split([[places[each] for each in decision.members]], ["elastic"], self._timeout)
        return decision, own, max(each.made for each in reports)

    def _rivals(self, ids: list[int]) -> int:
        """Return the number of processes of the last meeting that may continue without the ones with these ids."""
        missing = set(self._present).difference(ids)
        if self._proof is None or not count_rivals(ids, missing):
            return 0
        return count_rivals(ids, missing - self._proof.ended(missing))

    def _carry_out(self, decision: Decision, own: Backend | None, made: int) -> bool:
        """Make the default group again if that was decided, and give all ranks the same state."""
        if decision.remakes:
            clear("the ranks of the job have changed")
            WORLD.made = made
            if own is not None:
                with self._waiting(FORM_LEAST):
                    self._form(own)
        self.changes = decision.changes
        if not decision.ends and not decision.reason and self._id in decision.members:
            self._take_over(default_group(), decision.source)
        return True

    def _commit(self, decision: Decision) -> bool:
        """Store the decision on which all have agreed; tell whether the job ends."""
        if decision.reason:
            self._has_ended = True
            raise DistBackendError(decision.reason) from self._error
        self._error = None
        self._epoch, self._members, self.size = decision.epoch, decision.members, len(decision.members)
        self.rank = self._members.index(self._id) if self._id in self._members else None
        self.changes = self._agreed_changes = decision.changes
        self._present = decision.present
        if decision.lost:
            self._changed.append(time.monotonic())
            LOG.info("lost %s; %d ranks go on", format_ranks(decision.lost), self.size)
        return decision.ends

    def _form(self, own: Backend) -> None:
        """Make the default group on a communicator; every rank of it calls."""
        bootstrap = Bootstrap(own.rank, own.size, self._timeout, device_id=self._device)
        backends = registry.connect_all(self._carriers, bootstrap, own)
        name, timeout = WORLD.next_name(), self._timeout
        make_default_group(backends, self._config, name, timeout, self._device, None, self._is_shown)

    def _take_over(self, group: Group, source: int) -> None:
        """Take the state of one rank, and call ``setup``."""
        self._snapshot.broadcast(group, source)
        self._snapshot.restore()
        self._done, self._stops, self._holds = self._snapshot.step, False, True
        self.rank, self.size = group.rank(), group.size()
        if self._setup is not None:
            self._setup()

    @contextmanager
    def _waiting(self, least: float = 0.0) -> Iterator[None]:
        """Limit a wait for all living processes by the timeout, or by ``least`` seconds if the timeout is shorter."""
        for watchdog in RUNNING:
            limit = max(self._timeout.total_seconds(), least)
            lost = self._started - self._everyone.size
            watchdog.meeting = Meeting(self._everyone, limit, watchdog.clock(), lost)
        try:
            yield
        finally:
            for watchdog in RUNNING:
                watchdog.meeting = None


def is_hit() -> bool:
    """Tell whether a group of this process has lost a rank or was revoked."""
    return any(backend.faults.is_revoked() or backend.faults.failed() for backend in WORLD.backends())


def revoke_groups(reason: str) -> None:
    """Make the calls under way on all groups of this process raise, on all their ranks."""
    for group in list(WORLD.groups.values()):
        group.revoke(reason)


def clear(reason: str) -> None:
    """Remove all groups of this process, torch's too, without calls that need all of their ranks."""
    revoke_groups(reason)
    for group in list(WORLD.groups.values()):
        group.abort(reason, ends_calls=False)
    if WORLD.default is not None:
        WORLD.clear()


def elastic(spares: int = 0, min_size: int = 1, max_changes_per_hour: int = 20) -> ElasticJob:
    """Return a job that continues when ranks die; every process of the job enters it by ``with``.

    The last ``spares`` processes wait outside the default group until one of its ranks dies, and take its place.
    Without a spare the job continues with fewer ranks. The default group, torch.distributed's world too, is made again
    after each change, and ends with the ``with`` block; the program makes other groups and meshes again (``setup`` of
    ``steps``). An existing default group is used, with its backend and timeout; else ``init_process_group()`` makes
    one. If MPI does not survive a dead rank, rank 0 warns, and the same program runs as long as none dies.

    Args:
        spares: the number of processes that wait, of all that were started.
        min_size: the smallest number of ranks with which the job continues.
        max_changes_per_hour: how often ranks may be replaced or given up, so that a job on a broken node ends.

    Returns:
        The job; see ``ElasticJob.steps``. Entering it raises ValueError if the numbers do not match the job.

    Raises:
        TypeError: a number that is not an integer.

    Source: MPI_Comm_revoke, MPI_Comm_shrink and MPI_Comm_agree of User-Level Failure Mitigation.
    """
    return ElasticJob(spares, min_size, max_changes_per_hour)
