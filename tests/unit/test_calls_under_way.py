"""Looks at the stacks of other threads, which go on meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading

import pytest

from hpcdist.watch import calls_under_way

# a collection whose callback gives way, in nearly every look, and frames that are other functions' a moment later
LOOKING = """
    import gc, random, sys, threading, time
    from hpcdist.watch import calls_under_way

    def one(n, a=1.0):
        b, c = [n], {n: n}
        return random.choice((one, two, three))(n - 1) if n else time.sleep(0)

    def two(n):
        return random.choice((one, two, three))(n - 1) if n else time.sleep(0)

    def three(n):
        p = q = r = s = t = u = n
        return random.choice((one, two, three))(n - 1) if n else (lambda: (p, n))()

    def work():
        while True:
            one(random.randrange(200))

    def look():
        while True:
            calls_under_way.stack_in(GROUP)
            looks.append(1)

    GROUP, looks = object(), []
    gc.callbacks.append(lambda phase, info: time.sleep(0))
    gc.set_threshold(7)
    sys.setswitchinterval(1e-5)
    calls_under_way.PACKAGE = "<string>"  # their variables are read too
    for call in (work, work, work, look, look):
        threading.Thread(target=call, daemon=True).start()
    time.sleep(3)
    print("looks", len(looks), flush=True)
    __import__("os")._exit(0)
"""


def test_threads_that_go_on_while_two_look_at_them():
    """Python 3.11 crashed, or blocked in ``sys._current_frames``, if a collection came in between."""
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(LOOKING)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert int(ended.stdout.removeprefix("looks")) > 10


def blocked_in_a_call(group, entered, wanted):
    variable = group
    entered.set()
    wanted.wait()
    return variable


def test_the_thread_in_a_call_on_a_group_is_found(monkeypatch):
    monkeypatch.setattr(calls_under_way, "PACKAGE", __file__)
    group, entered, wanted = object(), threading.Event(), threading.Event()
    thread = threading.Thread(target=blocked_in_a_call, args=(group, entered, wanted))
    thread.start()
    entered.wait()
    try:
        names = [code.co_name for code, _ in calls_under_way.stack_in(group)]
        assert "blocked_in_a_call" in names
        assert names.index("blocked_in_a_call") < names.index("run")  # innermost first
        here = [code.co_name for code, _ in calls_under_way.stack_in(object())]
        assert "test_the_thread_in_a_call_on_a_group_is_found" in here
    finally:
        wanted.set()
        thread.join()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collections_are_as_before_after_a_look(is_enabled):
    if not is_enabled:
        gc.disable()
    try:
        calls_under_way.main_line()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/venv/lib/python3.11/site-packages/nccl/core/communicator.py", False),
        ("/venv/lib/python3.11/site-packages/mpi4py/util/pkl5.py", False),
        ("/home/user/nccl/train.py", True),
    ],
)
def test_the_users_line_is_not_one_of_the_libraries_below(path, expected):
    assert calls_under_way.is_users(compile("", path, "exec")) is expected
