"""Looks at the stacks of other threads, which go on meanwhile."""

import gc
import subprocess
import sys
import textwrap
import threading

import pytest

from hpcdist.core.journal import Journal
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
            calls_under_way.stack_of(random.choice(threads).ident)
            looks.append(1)

    looks = []
    gc.callbacks.append(lambda phase, info: time.sleep(0))
    gc.set_threshold(7)
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in [*threads, *(threading.Thread(target=look, daemon=True) for _ in range(2))]:
        thread.start()
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


def blocked_in_a_call(journal, entered, wanted):
    with journal.during("barrier"):
        entered.set()
        wanted.wait()


def test_the_thread_in_a_call_on_a_group_is_found():
    journal, entered, wanted = Journal("0"), threading.Event(), threading.Event()
    thread = threading.Thread(target=blocked_in_a_call, args=(journal, entered, wanted))
    thread.start()
    entered.wait()
    try:
        (blocked,) = journal.blocked()
        names = [code.co_name for code, _ in calls_under_way.stack_of(blocked.thread)]
        assert names.index("blocked_in_a_call") < names.index("run")  # innermost first
    finally:
        wanted.set()
        thread.join()
    here = [code.co_name for code, _ in calls_under_way.stack_of(thread.ident)]  # it has ended: the main thread
    assert "test_the_thread_in_a_call_on_a_group_is_found" in here


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collections_are_as_before_after_a_look(is_enabled):
    if not is_enabled:
        gc.disable()
    try:
        calls_under_way.line_in()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/venv/lib/python3.11/site-packages/nccl/core/communicator.py", False),
        ("/venv/lib/python3.11/site-packages/mpi4py/util/pkl5.py", False),
        ("/venv/lib/python3.11/site-packages/hpcdist_autoload.py", False),
        ("/home/user/nccl/train.py", True),
    ],
)
def test_the_users_line_is_not_one_of_the_libraries_below(path, expected):
    assert calls_under_way.is_users(compile("", path, "exec")) is expected
