"""What a rank tells who inspects it, and that its calls are timed no longer than somebody asks."""

import math
import sys

from hpcdist.core import hooks
from hpcdist.watch.endpoint import Endpoint
from hpcdist.watch.inspection import ENDPOINTS, Inspection, program
from hpcdist.watch.timing import COLLECTIVE, LISTENERS, TimedCall


def test_calls_are_timed_from_the_first_question_until_nobody_asks_any_more():
    made = Inspection()
    assert made.answer({}, -1)["calls"] == []
    assert hooks.is_profiled()
    for end in (10, 30):
        LISTENERS[0](TimedCall("all_reduce", "0", 1, None, 8, "job.py:1 (f)", 0, end, COLLECTIVE, False, 1))
    assert made.answer({}, -1)["calls"] == [["all_reduce", "job.py:1 (f)", False, 2, 16, 40, 30]]
    made.look(0.0)
    assert hooks.is_profiled()
    made.look(math.inf)
    made.look(math.inf)
    assert not hooks.is_profiled()


def test_endpoints_are_told_in_parts_that_fit():
    endpoint = Endpoint(("10.0.0.1",), 1, 2, "key", 0, "birth", "machine", "", "host")
    endpoints = {rank: endpoint._replace(pid=rank) for rank in range(ENDPOINTS + 3)}
    made, known = Inspection(), {}
    while len(known) < len(endpoints):
        known.update((rank, Endpoint(*each)) for rank, each in made.answer(endpoints, len(known))["endpoints"])
    made.look(math.inf)
    assert known == endpoints
    assert made.answer(endpoints, -1)["endpoints"] == []
    made.look(math.inf)


def test_a_program_that_embeds_python_has_no_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/solver.py", "--steps", "3"])
    assert program() == "solver.py --steps 3"
    sys.argv.clear()
    assert program() == ""
    monkeypatch.delattr(sys, "argv")
    assert program() == ""
