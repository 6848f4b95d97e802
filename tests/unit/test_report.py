"""The report of a call that has not ended, in the words that programs look for."""

from __future__ import annotations

import re

from hpcdist.watch import report

BARRIER = {
    "group": "0",
    "label": "group '0'",
    "name": "barrier",
    "number": 7,
    "message": False,
    "peer": None,
    "shape": None,
    "dtype": "",
    "seconds": 1.5,
    "where": "train.py:12 (main)",
    "background": False,
}


def test_the_headline_has_gloos_words_and_ours():
    said = report.headline(BARRIER, 1.5)
    assert re.match(r"Timed out waiting 1500ms: barrier #7 on group '0' has not ended after 1\.5 s", said)
    assert re.search(" (Timed out|closed|timeout) ", said)  # as torch's own tests search
    assert said.endswith("called at train.py:12 (main)")
