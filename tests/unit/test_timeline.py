"""Timeline of recorded calls: one clock, who waited for whom, the trace, the table."""

import pytest

import hpcdist as dist
from hpcdist.beyond.timeline import Share, Timeline
from hpcdist.core.printing import format_size
from hpcdist.watch.timing import COLLECTIVE, MESSAGE, TimedCall

MS = 1_000_000
HOUR = 3600 * 1000 * MS
WORLD = {"0": (0, 1)}


def call(begin, end, number=1, kind=COLLECTIVE, is_async=False, name="all_reduce", group="0", peer=None):
    where = "job.py:7 (train)"
    return TimedCall(name, group, number, peer, 1024, where, begin * MS, end * MS, kind, is_async, 99)


def shifted(each, by):
    return each._replace(begin=each.begin + by, end=each.end + by)


def share(*calls, begin=0, end=100, by=0, groups=WORLD):
    return Share("node", begin * MS + by, end * MS + by, [shifted(each, by) for each in calls], groups)


def test_clocks_that_differ_by_hours_are_one():
    made = Timeline([share(call(10, 21)), share(call(20, 21), by=HOUR)], [(0, 0), (-HOUR, -HOUR)])
    assert [[(each.begin, each.end) for each in calls] for calls in made.calls] == [
        [(10 * MS, 21 * MS)],
        [(20 * MS, 21 * MS)],
    ]
    assert made.seconds == pytest.approx(0.1)


def test_a_clock_that_drifts_is_brought_back_evenly():
    made = Timeline([share(), share(call(50, 60))], [(0, 0), (0, -10 * MS)])
    assert made.calls[1][0].begin == 45 * MS
    assert made.calls[1][0].end == 54 * MS


def test_a_rank_waits_until_the_last_one_has_come_and_no_longer_than_its_call():
    made = Timeline([share(call(10, 21), call(30, 31, 2)), share(call(20, 21), call(40, 41, 2))], [(0, 0), (0, 0)])
    assert made.waits == {(0, 0): 10 * MS, (0, 1): 1 * MS}  # the second one ended before the other rank came
    first, second = made.ranks()
    assert (first.waiting, first.last, first.made_wait) == (pytest.approx(0.011), 0, 0)
    assert (second.waiting, second.last, second.made_wait) == (0, 2, pytest.approx(0.011))
    assert first.seconds == pytest.approx(0.012)


def test_nobody_waits_in_messages_nor_asynchronous_calls_nor_across_groups():
    ours = share(call(10, 60, 1, MESSAGE), call(10, 60, 2, is_async=True), call(10, 60, 3, group="1"))
    theirs = share(call(50, 60, 1, MESSAGE), call(50, 60, 2, is_async=True), call(50, 60, 3, group="2"))
    assert not any(Timeline([ours, theirs], [(0, 0), (0, 0)]).waits.values())


def test_groups_of_one_name_and_other_ranks_are_two():
    left = share(call(10, 20, group="part"), groups={"part": (0,)})
    right = share(call(15, 20, group="part"), groups={"part": (1,)})
    assert Timeline([left, right], [(0, 0), (0, 0)]).waits == {}


def test_rows_are_by_call_and_line():
    row, other = Timeline(
        [share(call(0, 10), call(20, 40, 2), call(50, 60, 3, is_async=True)), share(call(0, 10), call(20, 40, 2))],
        [(0, 0), (0, 0)],
    ).rows()
    assert (row.call, row.where, row.is_async, row.calls, row.nbytes) == (
        "all_reduce", "job.py:7 (train)", False, 4, 4096,
    )  # fmt: skip
    assert (row.seconds, row.share, row.median) == (pytest.approx(0.03), pytest.approx(0.3), pytest.approx(0.015))
    assert (other.is_async, other.calls, other.waiting) == (True, 1, 0)


def test_the_trace_has_a_process_a_rank_and_the_shape_that_viewers_read():
    groups = {"0": (0, 1), "back": (1, 0)}
    sent = call(50, 51, 1, MESSAGE, name="send", group="back", peer=1)
    made = Timeline([share(call(10, 21), sent, groups=groups), share(call(20, 21, is_async=True))], [(0, 0), (0, 0)])
    events = made.trace()["traceEvents"]
    check_trace(events, ranks=2)
    assert next(each["args"]["peer"] for each in events if each["name"] == "send") == 0  # as a global rank
    both = [each for each in events if each["ph"] in "be"]
    assert [each["ts"] for each in both] == [20_000, 21_000]


def check_trace(events, ranks):
    """Check events against Chrome's trace-event format, as far as it is used."""
    assert {each["pid"] for each in events} == set(range(ranks))
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert all(names[rank].startswith(f"rank {rank} on ") for rank in range(ranks))
    opened = {}
    for each in events:
        assert each["ph"] in ("M", "X", "b", "e")
        assert isinstance(each["name"], str)
        assert isinstance(each["tid"], int)
        assert each["ts"] >= 0
        if each["ph"] == "X":
            assert each["dur"] >= 0
        if each["ph"] == "b":
            opened[each["cat"], each["id"], each["name"]] = each["ts"]
        if each["ph"] == "e":
            assert opened.pop((each["cat"], each["id"], each["name"])) <= each["ts"]
        if each["ph"] in "Xb":
            assert {"group", "number", "bytes", "where"} <= each["args"].keys()
    assert not opened


def test_the_table_has_a_line_for_each_row_and_rank():
    made = Timeline([share(call(10, 21)), share(call(20, 21))], [(0, 0), (0, 0)])
    head, calls, ranks = made.table().split("\n\n")
    assert head.startswith("2 ranks, 0.100 s; a rank is in blocking calls for 0.006 s (6%), 0.005 s of it (5%)")
    assert calls.splitlines()[1].split() == [
        "all_reduce", "2", "2", "KiB", "0.0060", "6.0%", "6000.0", "0.0050", "job.py:7", "(train)",
    ]  # fmt: skip
    assert [line.split() for line in ranks.splitlines()[1:]] == [
        ["0", "node", "0.0110", "11.0%", "0.0100", "0", "0.0000"],
        ["1", "node", "0.0010", "1.0%", "0.0000", "1", "0.0100"],
    ]


def test_sizes_have_units():
    assert [format_size(each) for each in (0, 1023, 1536, 5 << 20, 64 << 20, 3 << 40, 1 << 55)] == [
        "0 B", "1023 B", "1.5 KiB", "5 MiB", "64 MiB", "3 TiB", "32768 TiB",
    ]  # fmt: skip


def test_a_profile_is_of_a_default_group():
    with pytest.raises(ValueError, match="Default process group has not been initialized"), dist.profile():
        raise AssertionError("the block must not begin")
