"""The report of a call that has not ended, in the words that programs look for."""

import io
import re
import sys

import pytest

from hpcdist.core.printing import write_to_stderr
from hpcdist.watch import report

BARRIER = {
    "group": "0",
    "label": "group '0'",
    "name": "barrier",
    "number": 7,
    "message": False,
    "peer": None,
    "root": None,
    "shape": None,
    "dtype": "",
    "seconds": 1.5,
    "where": "train.py:12 (main)",
    "background": False,
}


def test_the_headline_has_gloos_words_and_ours():
    said = report.headline(BARRIER, 1.5, True)
    assert re.match(r"Timed out waiting 1500ms: barrier #7 on group '0' has not ended after 1\.5 s", said)
    assert re.search(" (Timed out|closed|timeout) ", said)  # as torch's own tests search
    assert said.endswith("called at train.py:12 (main)")
    early = report.headline({**BARRIER, "seconds": 0.0}, 30.0, False)  # given up with another call of the group
    assert early.startswith("barrier #7 on group '0' has not ended after 0.0 s (the timeout is 30 s), called at ")


def test_a_message_names_its_peer_and_a_call_of_some_ranks_all_that_may_be_missing():
    message = {**BARRIER, "message": True}
    assert report.title({**message, "name": "recv"}) == "recv from anyone"
    assert report.title({**message, "name": "Window.get", "peer": 2}) == "Window.get from rank 2"
    assert report.title({**message, "name": "Window.put", "peer": 2}) == "Window.put to rank 2"
    assert report.title({**message, "name": "create_group"}) == "create_group"
    there = {1: {"calls": [], "leaving": False, "main": "train.py:9 (main)"}}
    lines = report.compose({**message, "name": "create_group"}, 0, range(3), there, lambda _: "its process is stopped")
    assert lines == [
        "rank 1 is not in a call of hpcdist, at train.py:9 (main)",
        "rank 2 has not met it; its process is stopped",
    ]


def test_ranks_in_one_call_with_several_roots():
    mine = {**BARRIER, "name": "broadcast", "root": 0}
    there = {rank: {"calls": [{**mine, "root": root}]} for rank, root in ((1, 2), (2, 0), (3, 2))}
    assert report.compose(mine, 0, range(4), there, lambda _: "") == [
        "the roots differ: ranks 0, 2: rank 0; ranks 1, 3: rank 2",
        "ranks 0 to 3 are in it",
    ]


class Stream(io.TextIOBase):
    """Keeps what is written to it."""

    def __init__(self):
        self.kept = ""

    def write(self, text):
        self.kept += text
        return len(text)


def closed():
    stream = Stream()
    stream.close()
    return stream


class Broken(Stream):
    """A pipe that nobody reads."""

    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize("other", [None, closed(), Broken()], ids=["None", "closed", "broken"])
def test_a_report_needs_no_other_stream_and_stops_nobody(other, monkeypatch):
    stderr = Stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "stdout", other)
    write_to_stderr("text")
    assert stderr.kept == "text"
    monkeypatch.setattr(sys, "stderr", other)
    write_to_stderr("text")
