"""Timeline of all ranks on one clock: as a trace that Perfetto and Chrome open, and as a summary table.

A rank's clock is converted to rank 0's by two measured differences, at the beginning and at the end, between which a
linear drift is assumed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from hpcdist.core.journal import MESSAGES
from hpcdist.core.printing import aligned_text, format_size
from hpcdist.watch.timing import COLLECTIVE, TimedCall

COLUMNS = ("call", "calls", "bytes", "time s", "share", "median µs", "waiting s", "where")
RANK_COLUMNS = ("rank", "host", "in calls s", "share", "waiting s", "last in", "made wait s")
NAME_LENGTH = 28  # of a call in the table


class Share(NamedTuple):
    """The record of one rank."""

    host: str
    begin: int  # nanoseconds on its clock
    end: int
    calls: list[TimedCall]  # in the order in which they ended
    groups: dict[str, tuple[int, ...]]  # the global ranks of each group, by its name


class Row(NamedTuple):
    """A call at one line of the program, on all ranks."""

    call: str  # c10d's name, or ``wait(all_reduce)`` for a wait
    where: str  # the line, as ``file.py:88 (function)``
    is_async: bool  # whether it was asynchronous
    calls: int  # the number of calls of all ranks
    nbytes: int  # of the tensors sent (or received, if none is sent), by all ranks together
    seconds: float  # from begin to end, of a rank on average
    share: float  # of the recorded time; 0 to 1, or more for asynchronous calls that overlap
    median: float  # seconds of one call
    waiting: float  # the part of ``seconds`` before the last rank came; 0 for asynchronous calls


class RankRow(NamedTuple):
    """The waits of a rank, and the waits for it."""

    rank: int  # the global rank
    host: str  # the host
    seconds: float  # seconds in calls that block
    share: float  # of the recorded time
    waiting: float  # seconds that it waited in collectives for the last rank
    last: int  # the number of collectives that it entered last
    made_wait: float  # seconds that the others waited for it then, in total


class Timeline:
    """The calls of all ranks on rank 0's clock, given their shares in order.

    The offsets of each are the nanoseconds to add to its clock at the beginning and at the end.
    """

    def __init__(self, shares: Sequence[Share], offsets: Sequence[tuple[int, int]]) -> None:
        self.shares = shares
        moved = [align(share, *offset) for share, offset in zip(shares, offsets, strict=True)]
        zero = min(begin for begin, _, _ in moved)
        self.seconds = (max(end for _, end, _ in moved) - zero) / 1e9
        self.calls = [
            [call._replace(begin=call.begin - zero, end=call.end - zero) for call in calls] for _, _, calls in moved
        ]
        self.waits: dict[tuple[int, int], int] = {}  # nanoseconds that each call waited, by rank and index
        # by rank: how often it was last, the others' waits for it then, and its own waits
        self._last, self._made_wait, self._waited = Counter[int](), Counter[int](), Counter[int]()
        self._find_waits()

    def _find_waits(self) -> None:
        """Compute the waits. A collective is identified by the group's name and ranks and by its number."""
        entered: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
        for rank, calls in enumerate(self.calls):
            groups = self.shares[rank].groups
            for place, call in enumerate(calls):
                if call.kind == COLLECTIVE:
                    entered[call.group, groups.get(call.group), call.number].append((rank, place))
        for places in entered.values():
            if len(places) < 2:
                continue
            late = max(places, key=lambda each: self.calls[each[0]][each[1]].begin)
            moment = self.calls[late[0]][late[1]].begin
            self._last[late[0]] += 1
            for rank, place in places:
                call = self.calls[rank][place]
                if not call.is_async and (rank, place) != late:
                    self.waits[rank, place] = wait = max(0, min(moment, call.end) - call.begin)
                    self._made_wait[late[0]] += wait
                    self._waited[rank] += wait

    def rows(self) -> list[Row]:
        """Return the rows of the summary, the longest first, those that block before asynchronous ones."""
        from statistics import median  # imported here, because it imports decimal

        found: dict[tuple[bool, str, str], list[tuple[TimedCall, int]]] = defaultdict(list)
        for rank, calls in enumerate(self.calls):
            for place, call in enumerate(calls):
                found[call.is_async, call.title, call.where].append((call, self.waits.get((rank, place), 0)))
        made = []
        for (is_async, name, where), pairs in found.items():
            times = [call.end - call.begin for call, _ in pairs]
            seconds = sum(times) / 1e9 / len(self.shares)
            waiting = sum(wait for _, wait in pairs) / 1e9 / len(self.shares)
            nbytes, share = sum(call.nbytes for call, _ in pairs), seconds / self.seconds
            made.append(Row(name, where, is_async, len(pairs), nbytes, seconds, share, median(times) / 1e9, waiting))
        return sorted(made, key=lambda row: (row.is_async, -row.seconds))

    def ranks(self) -> list[RankRow]:
        """Return a row for each rank."""
        made = []
        for rank, calls in enumerate(self.calls):
            seconds = sum(call.end - call.begin for call in calls if not call.is_async) / 1e9
            waiting, made_wait = self._waited[rank] / 1e9, self._made_wait[rank] / 1e9
            host, share = self.shares[rank].host, seconds / self.seconds
            made.append(RankRow(rank, host, seconds, share, waiting, self._last[rank], made_wait))
        return made

    def table(self) -> str:
        """Return the summary as text."""
        rows, ranks = self.rows(), self.ranks()
        blocked = sum(row.seconds for row in ranks) / len(ranks)
        waiting = sum(row.waiting for row in ranks) / len(ranks)
        head = (
            f"{len(ranks)} rank{'s' * (len(ranks) > 1)}, {self.seconds:.3f} s; a rank is in blocking calls for "
            f"{blocked:.3f} s ({blocked / self.seconds:.0%}), {waiting:.3f} s of it ({waiting / self.seconds:.0%}) "
            "until the last rank has come"
        )
        calls = []
        for row in rows:
            name, wait = f"{row.call}{' async' * row.is_async}", "-" if row.is_async else f"{row.waiting:.4f}"
            times = f"{row.seconds:.4f}", f"{row.share:.1%}", f"{row.median * 1e6:.1f}", wait
            calls.append((name[:NAME_LENGTH], f"{row.calls}", format_size(row.nbytes), *times, row.where))
        by_rank = []
        for each in ranks:
            times = f"{each.seconds:.4f}", f"{each.share:.1%}", f"{each.waiting:.4f}", f"{each.last}"
            by_rank.append((f"{each.rank}", each.host, *times, f"{each.made_wait:.4f}"))
        return "\n\n".join([head, aligned_text([COLUMNS, *calls], {0, 7}), aligned_text([RANK_COLUMNS, *by_rank], {1})])

    def trace(self) -> dict[str, Any]:
        """Return the trace: an object of Chrome's trace-event format, whose times are microseconds.

        Each rank is a process, and each thread that makes calls a thread of it. A call that blocks is a complete event
        (``X``), an asynchronous one a pair (``b``, ``e``), which is drawn as a line of its own.
        """
        events: list[dict[str, Any]] = []
        for rank, (share, calls) in enumerate(zip(self.shares, self.calls, strict=True)):
            threads: dict[int, int] = {}
            about = {"ph": "M", "pid": rank, "tid": 0, "ts": 0}
            events.append({**about, "name": "process_name", "args": {"name": f"rank {rank} on {share.host}"}})
            events.append({**about, "name": "process_sort_index", "args": {"sort_index": rank}})
            for place, call in enumerate(calls):
                tid = threads.setdefault(call.thread, len(threads))
                where = {"pid": rank, "tid": tid, "cat": call.kind, "name": call.title}
                args: dict[str, Any] = {"group": call.group, "number": call.number, "bytes": call.nbytes}
                args["where"] = call.where
                if call.peer is not None:
                    args["peer" if call.name in MESSAGES else "root"] = self._global(rank, call)
                if (wait := self.waits.get((rank, place))) is not None:
                    args["waiting_us"] = wait / 1e3
                if not call.is_async:
                    times = {"ts": call.begin / 1e3, "dur": (call.end - call.begin) / 1e3}
                    events.append({"ph": "X", **where, **times, "args": args})
                    continue
                both = {"id": f"{rank}.{place}", **where}
                events.append({"ph": "b", **both, "ts": call.begin / 1e3, "args": args})
                events.append({"ph": "e", **both, "ts": call.end / 1e3})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"ranks": len(self.shares)}}

    def _global(self, rank: int, call: TimedCall) -> int | None:
        """Return a call's peer or root as a global rank."""
        ranks = self.shares[rank].groups.get(call.group)
        return call.peer if ranks is None or call.peer is None else ranks[call.peer]


def align(share: Share, first: int, last: int) -> tuple[int, int, list[TimedCall]]:
    """Return begin, end and calls of a share on rank 0's clock."""
    slope = (last - first) / max(1, share.end - share.begin)

    def moved(moment: int) -> int:
        return moment + first + round(slope * (moment - share.begin))

    calls = [call._replace(begin=moved(call.begin), end=moved(call.end)) for call in share.calls]
    return moved(share.begin), moved(share.end), calls
