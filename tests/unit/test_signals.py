"""Signals beside a program that handles some itself, by asyncio or a descriptor, and in its children."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import pytest

from tests.programs import run

# each case in a process of its own, forked before the group is made, which takes less time than to import torch
CASES = """
import asyncio, faulthandler, hashlib, json, multiprocessing, os, signal, socket, subprocess, sys, tempfile
import threading, time
from signal import set_wakeup_fd as pythons_own
import hpcdist as dist
from hpcdist.core import shutdown
from hpcdist.watch.signals import HANDLED, Signals, is_pythons

WORKS = b"secret", b"salt", 1_000_000  # for a second without the GIL, in which no handler runs
STATE = '''import json, signal
mask = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))]
print(json.dumps([*mask, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL]))'''

def send(number, seconds=0.1):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()

def traced():
    return "trace_0" in os.listdir(folder)

async def handled(number, before=lambda: None, seconds=5):
    came = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(number, came.set)
    before()
    send(number)
    await asyncio.wait_for(came.wait(), seconds)

async def other_handler(seconds):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: None)
    if seconds:
        send(signal.SIGTERM)
    await asyncio.sleep(seconds)

def sigterm_in_a_loop_that_handles_another():
    dist.init_process_group("loopback")
    asyncio.run(other_handler(5))

def sigterm_after_such_a_loop():
    dist.init_process_group("loopback")
    asyncio.run(other_handler(0))
    send(signal.SIGTERM)
    time.sleep(5)

def sigint_while_a_work_is_dropped():
    from hpcdist.core.work import DoneWork
    from hpcdist_stores.keep_alive import KeptAlive
    dist.init_process_group("loopback")
    def address(kept, *_):
        signal.raise_signal(signal.SIGINT)
        return id(kept)
    work, delete = DoneWork([])._for_cpp(), KeptAlive.__del__
    delete.__defaults__ = (address, *delete.__defaults__[1:])
    try:
        del work
        time.sleep(5)
    except KeyboardInterrupt:
        return "raised"

def sigterm_past_our_function():
    dist.init_process_group("loopback")
    pythons_own(-1)
    send(signal.SIGTERM)
    time.sleep(5)

def sigterm_with_printed_lines():
    sys.stdout = open(folder + "/output", "w")
    dist.init_process_group("loopback")
    print("in Python's buffer")
    send(signal.SIGTERM)
    time.sleep(5)

def sigterm_as_python_ends():
    dist.init_process_group("loopback")
    shutdown.shut_down()
    os.kill(os.getpid(), signal.SIGTERM)  # from here on the watchdog's thread does not get the GIL any more

def sigterm_before_the_exit_functions():
    dist.init_process_group("loopback")
    os.kill(os.getpid(), signal.SIGTERM)
    shutdown.shut_down()

def sigterm_that_the_program_has_handled():
    dist.init_process_group("loopback")
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    os.kill(os.getpid(), signal.SIGTERM)
    while not traced():
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, before)  # as Lightning does
    shutdown.shut_down()
    return came == [True]

def handler_made_after_init():
    dist.init_process_group("loopback")
    asyncio.run(handled(signal.SIGTERM))
    return dist.stop_requested()

def handler_made_before_init():
    asyncio.run(handled(signal.SIGTERM, lambda: dist.init_process_group("loopback")))
    send(signal.SIGUSR1)
    time.sleep(0.3)
    return dist.stop_requested()

def heard_beside_a_loop_while_python_does_not_run():
    dist.init_process_group("loopback")
    async def work():
        await other_handler(0)
        send(signal.SIGUSR1)
        threading.Timer(0.5, lambda: told.append(traced())).start()
        while not told:
            hashlib.pbkdf2_hmac("sha256", *WORKS)
    told = []
    asyncio.run(work())
    return told[0]

def descriptors():
    (reader, theirs), (_, second) = socket.socketpair(), socket.socketpair()
    for each in reader, theirs, second:
        each.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno())
    dist.init_process_group("loopback")
    send(signal.SIGUSR1, 0)
    time.sleep(0.3)
    found = [reader.recv(9) == bytes([signal.SIGUSR1])]
    found.append(signal.set_wakeup_fd(second.fileno()) == theirs.fileno())
    try:
        signal.set_wakeup_fd(10**6)
    except (ValueError, OSError):
        found.append(signal.set_wakeup_fd(theirs.fileno()) == second.fileno())
    return all(found)

def interrupts_that_the_program_has_caught():
    found = Signals()
    found.install()
    try:
        send(signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        pass
    is_caught = found.arrived() == [signal.SIGINT, HANDLED]
    found.writer.send(bytes([signal.SIGINT, HANDLED, signal.SIGINT]))
    is_python_s = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    asyncio.run(asyncio.sleep(0))
    return is_caught and found.arrived() == [HANDLED, signal.SIGINT] and is_python_s and is_pythons(found._raises)

def in_children():
    # what a child has is what this process had, whatever the thread that forks; the descriptor is closed by then
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno())
    dist.init_process_group("loopback")
    theirs.close()
    def state():
        mask = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))]
        ports = len([each for each in os.listdir("/proc/self/fd") if is_socket(int(each))])
        is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        is_own = signal.set_wakeup_fd is pythons_own
        interrupt = [str(signal.getsignal(signal.SIGINT)), str(signal.default_int_handler)]
        return [mask, is_default, is_own, pythons_own(-1), ports, *interrupt]
    def is_socket(number):
        try:
            return os.readlink(f"/proc/self/fd/{number}").startswith("socket")
        except OSError:
            return False
    states = []
    def fork():
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, json.dumps(state()).encode())
            os._exit(0)
        states.append(json.loads(os.read(reader, 1000)))
    fork()
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    pythons = "<built-in function default_int_handler>"
    fresh = [[], True, True, -1, 1, pythons, pythons]  # ``ours`` is the program's
    started = [
        json.loads(subprocess.run([sys.executable, "-c", STATE], preexec_fn=hook, stdout=subprocess.PIPE).stdout)
        for hook in (None, lambda: None)
    ]
    assert states == [fresh, fresh], states
    assert started == [[True], [True]], started
    return signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()

def handler_of_faulthandler():
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        dist.init_process_group("loopback")
        def is_dumped():
            before = os.fstat(file.fileno()).st_size
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.3)
            return os.fstat(file.fileno()).st_size > before
        return is_dumped() and not dist.stop_requested() and not is_dumped() and dist.stop_requested()

def hook_of_a_child_with_a_group_of_its_own():
    runs = []
    sys.excepthook = lambda *exception: runs.append(exception[0])
    dist.init_process_group("loopback")
    reader, writer = os.pipe()
    if os.fork() == 0:
        dist.destroy_process_group()
        dist.init_process_group("loopback")
        sys.excepthook(ZeroDivisionError, ZeroDivisionError(), None)
        os.write(writer, bytes([len(runs)]))
        os._exit(0)
    return os.read(reader, 1)[0] == 1 and not runs

dist.init_process_group  # what it needs is imported here, not in each child: 1.5 s
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
for name in sys.argv[1:]:
    folder = tempfile.mkdtemp()
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = folder + "/trace_"
    if (pid := os.fork()) == 0:
        os._exit(0 if globals()[name]() else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output = open(folder + "/output").read() if os.path.exists(folder + "/output") else ""
    print(json.dumps([name, status, traced(), output]), flush=True)
"""

PRINTS = "sigterm_with_printed_lines"
ENDED = ("sigterm_in_a_loop_that_handles_another", "sigterm_after_such_a_loop", "sigterm_past_our_function")
AT_THE_END = ("sigterm_as_python_ends", "sigterm_before_the_exit_functions")
TRUE = (
    "handler_made_after_init",
    "handler_made_before_init",
    "heard_beside_a_loop_while_python_does_not_run",
    "descriptors",
    "interrupts_that_the_program_has_caught",
    "sigint_while_a_work_is_dropped",
    "sigterm_that_the_program_has_handled",
    "in_children",
    "handler_of_faulthandler",
    "hook_of_a_child_with_a_group_of_its_own",
)


@pytest.fixture(scope="module")
def ended() -> tuple[dict[str, Any], str]:
    """The status of each case and whether it left a trace, and what was written to stderr."""
    ran = run([sys.executable, "-c", CASES, PRINTS, *ENDED, *AT_THE_END, *TRUE], timeout=120)
    told = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    return {name: rest for name, *rest in told}, ran.stderr


ONE_RUN = pytest.mark.xdist_group("signals")  # of all cases, for tests that share it


@ONE_RUN
@pytest.mark.parametrize("case", ENDED)
def test_sigterm_ends_the_program_after_a_trace(case: str, ended: tuple[dict[str, Any], str]) -> None:
    assert ended[0][case] == [-signal.SIGTERM, True, ""], ended[1]


@ONE_RUN
def test_printed_lines_are_written_before_sigterm_ends_the_program(ended: tuple[dict[str, Any], str]) -> None:
    assert ended[0][PRINTS] == [-signal.SIGTERM, True, "in Python's buffer\n"], ended[1]


@ONE_RUN
@pytest.mark.parametrize("case", AT_THE_END)
def test_sigterm_ends_a_program_that_ends_already(case: str, ended: tuple[dict[str, Any], str]) -> None:
    """The watchdog may not come to it; ``os._exit(0)`` follows."""
    assert ended[0][case][0] == -signal.SIGTERM, ended[1]


@ONE_RUN
@pytest.mark.parametrize("case", TRUE)
def test_what_the_program_finds(case: str, ended: tuple[dict[str, Any], str]) -> None:
    assert ended[0][case][0] == 0, ended[1]
