"""Mutants: ``python -m tests.mutants [NUMBER …]`` breaks one line at a time, and says which test noticed it.

Each line below guards an order, an agreement, a lifetime or a check. A copy of the project in which it is broken must
fail the tests that stand beside it; what survives is printed, and the exit status is 1. ``--beside N`` tries N at once.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests import forked
from tests.programs import mpirun_command, output, start

ROOT = Path(__file__).parents[1]
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--color=no", "--timeout", "60")
SECONDS = 200
NO_TESTS, NOTHING_CHOSEN = (
    5,
    re.compile(r"no tests ran|^\d+ deselected", re.MULTILINE),
)  # pytest's
RANKS = 3
ON_RANKS = ("mpi", "parity", "torch")  # folders whose tests run under mpirun


class Mutant(NamedTuple):
    """A line to break.

    Attributes:
        file: where it is, below src.
        old: a part of the file that occurs once.
        new: what stands there instead.
        tests: files below tests that should notice it, with pytest's -k after a colon.
    """

    file: str
    old: str
    new: str
    tests: str

    @property
    def name(self) -> str:
        """Where it is, and its first line."""
        return f"{self.file}: {next(each.strip() for each in self.old.splitlines() if each.strip())[:70]!r}"

    def occurs(self, folder: Path) -> int:
        """Return how often the line stands in a copy of the project."""
        return (folder / "src" / self.file).read_text().count(self.old)


CORE, MPI_BACKEND, NODE = "hpcdist/core", "hpcdist/backends/mpi", "hpcdist/backends/mpi/node"
C10D, WATCH, TCP = "hpcdist/c10d", "hpcdist/watch", "stores/tcp"
QUEUE, WORK, ISSUE, BUFFERS, CACHE = (
    f"{CORE}/{each}.py" for each in ("queue", "work", "issue", "buffers", "call_cache")
)
IN_QUEUE = "unit/test_core_queue.py mpi/test_async_order.py"
BESIDE_CACHE = "mpi/test_repetition.py mpi/test_collectives.py"
WINDOW = "mpi/test_shared_memory.py"

MUTANTS = [
    # -- core.queue: order of calls, and what a Work may be used again for
    Mutant(
        QUEUE,
        "        if self.carrier is not None and self.carrier == get_ident():\n            self._follow(work)\n",
        "        if False:\n            self._follow(work)\n",
        IN_QUEUE,
    ),
    Mutant(
        QUEUE,
        "            raise self._given_up()\n        self._calls",
        "            pass\n        self._calls",
        IN_QUEUE,
    ),
    Mutant(QUEUE, "(self._calls or self._turn.locked()) and self.carrier", "self._calls and self.carrier", IN_QUEUE),
    Mutant(QUEUE, "        if self.broken is not None:  # also", "        if False:  # also", IN_QUEUE),
    Mutant(QUEUE, "    if isinstance(before._error, CallsDifferError):\n", "    if False:\n", IN_QUEUE),
    Mutant(QUEUE, "            self._thread.join()\n", "            pass\n", IN_QUEUE),
    Mutant(QUEUE, "        for work in self.pending():\n            work._finish(error)\n", "", IN_QUEUE),
    Mutant(QUEUE, "    if modes == (is_inf", "    if True or modes == (is_inf", IN_QUEUE),
    Mutant(
        CACHE,
        "if any(each.is_inference() for each in tensors) else run",
        "if False else run",
        "unit/test_core_plans.py",
    ),
    Mutant(
        QUEUE,
        "                self._stolen = work = calls[0]\n",
        "                calls.rotate(1)\n                self._stolen = work = calls[0]\n",
        IN_QUEUE,
    ),
    Mutant(
        QUEUE,
        "            self.running = self._calls[0]\n",
        "            self._calls.rotate(1)\n            self.running = self._calls[0]\n",
        IN_QUEUE,
    ),
    Mutant(QUEUE, "                raise  # Ctrl-C", "                pass  # Ctrl-C", IN_QUEUE),
    # -- core.work: the end of a call is told once, with its error
    Mutant(
        WORK, "        if self._done:  # a call that was given up", "        if False:  # a call that was", IN_QUEUE
    ),
    Mutant(
        WORK,
        "            raise self._error\n        return True\n",
        "        return True\n",
        IN_QUEUE,
    ),
    Mutant(
        WORK,
        "        self._is_asked = True\n        if self._done:\n            self._tell()\n",
        "        self._is_asked = True\n",
        f"{IN_QUEUE} mpi/test_async.py",
    ),
    # -- core.issue: what a call that comes again must have in common, and what is checked before anything is sent
    Mutant(ISSUE, "known.op is op\n                and known.in_place", "known.in_place", BESIDE_CACHE),
    Mutant(
        ISSUE,
        "kind = row if root is None and counts is None else (row, root)\n",
        "kind = row if root is None and counts is None else (row, 0)\n",
        BESIDE_CACHE,
    ),
    Mutant(f"{CORE}/call_cache.py", "            and fits(send.numel(), recv.numel(), ranks)\n", "", BESIDE_CACHE),
    Mutant(
        f"{CORE}/call_cache.py",
        "            and len(set(map(NBYTES, tensors))) == 1\n",
        "",
        BESIDE_CACHE,
    ),
    Mutant(
        ISSUE, "                and known.in_place is (recv is send)\n", "", f"{BESIDE_CACHE} mpi/test_asymmetric.py"
    ),
    Mutant(
        ISSUE,
        "                    journal.retract(record)\n                    raise\n",
        "                    raise\n",
        "unit/test_journal.py",
    ),
    Mutant(
        ISSUE,
        "                elif backend.queue is not None:\n                    backend.queue.drain()\n",
        "",
        "mpi/test_async_order.py mpi/test_async.py",
    ),
    Mutant(
        ISSUE,
        "        if not (in_place and row.is_in_place) and not is_shaped(row, pg, given, output, counts):\n",
        "        if False:\n",
        "mpi/test_bad_input.py",
    ),
    Mutant(
        ISSUE,
        "        if not (in_place and row.is_in_place) and not is_shaped(row, pg, given, output, counts):\n",
        "        if not in_place and not is_shaped(row, pg, given, output, counts):\n",
        "mpi/test_calls_differ.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/repetition.py",
        "((seen := theirs[at]) != word or wide)",
        "(seen := theirs[at]) != word",
        "mpi/test_calls_differ.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/node/call_board.py",
        "    if call.counts is not None and call.row is ALL_REDUCE:\n",
        "    if False:\n",
        "mpi/test_calls_differ.py:several",
    ),
    Mutant(
        f"{MPI_BACKEND}/call_check.py",
        "            board.forget(self._start)",
        "            pass",
        "unit/test_call_check.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/call_check.py",
        "                if not self.is_clear(number):\n",
        "                if False:\n",
        "unit/test_call_check.py",
    ),
    Mutant(
        ISSUE,
        "        backend.check_reduction(row, either.dtype, op)\n",
        "",
        "unit/test_journal.py",
    ),
    Mutant(
        ISSUE,
        "            backend.settle()  # a call that is queued may still write what is copied here\n",
        "            pass\n",
        "mpi/test_async_order.py mpi/test_async.py",
    ),
    Mutant(
        ISSUE,
        "        backend.queue.drain()\n    try:\n        with journal.blocking(record):\n",
        "        pass\n    try:\n        with journal.blocking(record):\n",
        "mpi/test_async_order.py mpi/test_async.py",
    ),
    # -- core.buffers: the caller's memory
    Mutant(
        BUFFERS, "        if writable and not value.flags.writeable:\n", "        if False:\n", "mpi/test_bad_input.py"
    ),
    Mutant(
        BUFFERS,
        "    return first < second + other.nbytes and second < first + one.nbytes\n",
        "    return False\n",
        "unit/test_core_buffers.py mpi/test_asymmetric.py",
    ),
    Mutant(BUFFERS, "    if sum(splits) != rows or min", "    if min", "mpi/test_bad_input.py"),
    Mutant(BUFFERS, "        if tensor.nbytes != like.nbytes:", "        if False:", "unit/test_core_buffers.py"),
    # -- core: agreement of ranks
    Mutant(
        f"{CORE}/agreement.py",
        "    if len(set(backend.objects.all_gather(digest, call=call))) == 1:\n        return\n",
        "    return\n",
        "mpi/test_agreement.py",
    ),
    Mutant(
        f"{CORE}/agreement.py",
        "        if text:\n            kind",
        "        if False:\n            kind",
        "mpi/test_objects.py mpi/test_window.py mpi/test_node_shared.py",
    ),
    Mutant(
        f"{CORE}/objects.py",
        "        return UNPICKLABLE + json.dumps([rank, reason]).encode(), [], error\n",
        "        raise\n",
        "mpi/test_objects.py",
    ),
    Mutant(
        f"{CORE}/objects.py",
        "    if weights_only:\n        raise pickle",
        "    if False:\n        raise pickle",
        "mpi/test_objects.py",
    ),
    Mutant(
        f"{CORE}/objects.py",
        "    except BaseException as error:",
        "    except Exception as error:",
        "mpi/test_objects.py:interrupted",
    ),
    # -- backends.mpi: messages under way
    Mutant(
        f"{MPI_BACKEND}/point_to_point.py",
        "        communicator.unfinished.hold(self)\n",
        "",
        "mpi/test_point_to_point.py mpi/test_async.py torch/test_lifetimes.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/point_to_point.py",
        "            if self._reason is not None and self._status.Is_cancelled():\n",
        "            if False:\n",
        "mpi/test_point_to_point.py mpi/test_groups.py unit/test_mpi_progress.py faults/test_threads.py",
    ),
    Mutant(  # Open MPI copes with memory that overlaps; with MPICH's environment the test notices
        f"{MPI_BACKEND}/collectives.py",
        "            if recv is not None and overlap(send, recv):\n                send = send.clone()\n",
        "",
        "mpi/test_asymmetric.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/communicator.py",
        "        if self.left_by is not None:\n",
        "        if False:\n",
        "mpi/test_shared_memory_in_groups.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/communicator.py",
        "            self.revoke()  # what follows is decided by whether it is revoked, on all ranks alike\n"
        "            raise DistBackendError(self.interruption)\n",
        "            pass\n",
        "mpi/test_shared_memory_in_groups.py mpi/test_between_nodes.py faults/test_survival.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/retired.py",
        "        if not has_messages:\n            comm.Free()\n",
        "        comm.Free()\n",
        "mpi/test_point_to_point.py mpi/test_lifecycle.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/retired.py",
        "    if unfinished:\n        return False\n",
        "",
        "mpi/test_point_to_point.py mpi/test_lifecycle.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/retired.py",
        "        RETIRED.append((unfinished, None))\n",
        "        pass\n",
        "mpi/test_point_to_point.py mpi/test_lifecycle.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/receives.py",
        "                    if any(earlier.takes(source, tag) for earlier in self.waiting[:index]):\n",
        "                    if False:\n",
        "mpi/test_point_to_point.py",
    ),
    Mutant(
        f"{MPI_BACKEND}/receives.py",
        "                if not any(each.takes(source, tag) for each in self.waiting):\n",
        "                if True:\n",
        "mpi/test_point_to_point.py",
    ),
    # -- the window of a node: who may write where, and when
    Mutant(
        f"{NODE}/slices.py",
        "            if c < SLOTS:\n                window.wait(free[slot])\n",
        "",
        WINDOW,
    ),
    Mutant(f"{NODE}/slices.py", "            window.wait(step)\n            reduce(", "            reduce(", WINDOW),
    Mutant(f"{NODE}/slices.py", "            window.wait(step)\n            collect(", "            collect(", WINDOW),
    Mutant(f"{NODE}/window.py", "            self.wait(self.free[turn])\n            put(", "            put(", WINDOW),
    Mutant(f"{NODE}/window.py", "            self.wait(step)\n            get(", "            get(", WINDOW),
    Mutant(
        f"{NODE}/window.py", "            self.free[turn] = step + 2\n", "            self.free[turn] = 0\n", WINDOW
    ),
    Mutant(
        f"{NODE}/window.py",
        "        if failures:\n            raise R",
        "        if failure:\n            raise R",
        WINDOW,
    ),
    # -- c10d: barriers that are monitored, calls that are joined
    Mutant(
        f"{C10D}/monitored.py",
        "        if message.call != call:  # it came too late for an earlier call\n            continue\n",
        "",
        "mpi/test_groups.py",
    ),
    Mutant(f"{C10D}/monitored.py", "        elif sequence <= message.sequence:", "        else:", "mpi/test_groups.py"),
    Mutant(
        f"{C10D}/coalescing.py",
        "            if alike and canonical(call.op) is not canonical(op):\n                yield from flush()\n",
        "",
        "mpi/test_coalescing.py",
    ),
    Mutant(
        f"{C10D}/coalescing.py",
        "        yield from flush()\n        work = ",
        "        work = ",
        "mpi/test_coalescing.py torch/test_methods.py parity/test_parity.py",
    ),
    Mutant(
        f"{C10D}/coalescing.py",
        "    if pg.coalescing is not None:\n        raise",
        "    if False:\n        raise",
        "mpi/test_coalescing.py",
    ),
    # -- watch: whether and when a call is ended, and what proves a death
    Mutant(
        f"{WATCH}/escalation.py",
        "        self._watched = {id(each.record): each for each in kept}\n",
        "        self._watched |= {id(each.record): each for each in kept}\n",
        "unit/test_watch_states.py",
    ),
    Mutant(
        f"{WATCH}/escalation.py",
        "        if self.state is State.RUNNING and now - self.first_seen >= limit:\n",
        "        if self.state is State.RUNNING:\n",
        "unit/test_watch_states.py",
    ),
    Mutant(
        f"{WATCH}/escalation.py",
        "        self.state, self.since = State.DUE, now\n",
        "        self.state = State.DUE\n",
        "unit/test_watch_states.py",
    ),
    Mutant(f"{WATCH}/escalation.py", "        if took_effect:\n", "        if True:\n", "unit/test_watch_states.py"),
    Mutant(
        f"{WATCH}/watchdog.py",
        "        elif now >= self.reports.turn(collective, each.group.rank(), watched.since):\n",
        "        else:\n",
        "faults/test_asking.py",
    ),
    Mutant(f"{WATCH}/liveness.py", " if error == errno.ECONNREFUSED}", " if error}", "unit/test_proof_of_death.py"),
    Mutant(f"{WATCH}/liveness.py", " if found.get(each) == 0]", "]", "unit/test_proof_of_death.py"),
    Mutant(f"{WATCH}/question.py", "parts_of(sorted(part - {rank}))", "{}", "unit/test_many_ranks.py"),
    Mutant(f"{WATCH}/question.py", "for rank in late[:FAN]:", "for rank in late:", "unit/test_many_ranks.py"),
    Mutant(f"{WATCH}/channel.py", ' or message["numbering"] != self.numbering', "", "unit/test_many_ranks.py"),
    # -- stores
    Mutant(
        "stores/keep_alive.py", "sys.getrefcount(looked_at[0]) > _OWN or ", "", "stores/test_keep_alive.py:stays_kept"
    ),
    Mutant(
        f"{TCP}/session.py",
        "            self.connection = None\n            if connection is not None:\n",
        "            if False:\n",
        "stores/test_slow_server.py",
    ),
    Mutant(
        f"{TCP}/session.py",
        "            if connection.limit != limit:\n                connection.set_limit(limit)\n",
        "",
        "stores/test_slow_server.py",
    ),
    Mutant(
        f"{TCP}/session.py",
        "        session.lock = threading.Lock()\n        session.queue = deque()\n        session.close()\n",
        "        pass\n",
        "stores/test_tcp_store.py:fork",
    ),
    Mutant(f"{TCP}/session.py", "each.limit != limit or size", "size", "stores/test_shared_client.py:limits_of"),
    Mutant(
        f"{TCP}/session.py", "isinstance(error, ServerClosedError)", "False", "stores/test_shared_client.py:refuses"
    ),
    Mutant(
        f"{TCP}/session.py",
        "if threading.current_thread() is threading.main_thread():",
        "if False:",
        "stores/test_shared_client.py:interrupt",
    ),
    Mutant(
        f"{TCP}/session.py",
        "                if is_in_step and len",
        "                if len",
        "stores/test_slow_server.py stores/test_tcp_store.py",
    ),
    Mutant(
        f"{TCP}/session.py",
        "            if len(value) > MAX_VALUE:\n",
        "            if False:\n",
        "stores/test_tcp_store.py:server_would_refuse",
    ),
    Mutant(
        f"{TCP}/wire.py",
        '"hpcdist-store-1 " + role + server_nonce',
        '"hpcdist-store-1 " + server_nonce',
        "stores/test_tcp_store.py:others_proof",
    ),
    Mutant(f"{TCP}/server/requests.py", "    if size > limit:\n", "    if False:\n", "stores/test_attacks.py"),
    Mutant(
        "stores/hash_store.py",
        "            self._data.update(pairs)\n            self._changed.notify_all()\n",
        "            self._data.update(pairs)\n",
        "stores/test_hash_store.py",
    ),
]


def copy_project(folder: Path) -> None:
    """Copy what the tests need."""
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def run(folder: Path, ranks: int, *arguments: str, python: list[str] | None = None) -> str | None:
    """Run Python on some ranks (0: without mpirun) in a copy of the project; return the first failure, or None."""
    python = python or [sys.executable]
    command = mpirun_command(ranks, list(arguments), python=python) if ranks else [*python, *arguments]
    # the tests' own rules hold for these ranks, which are no program of a test
    variables = {"PYTHONPATH": f"{folder}/src:{folder}", "HPCDIST_TEST_CHILD": ""}
    process = start(command, folder, **variables)
    try:
        out, _ = output(process, SECONDS)
    except AssertionError:
        return f"no end within {SECONDS} s"
    if process.returncode == 0:
        return None
    # which is MPI_ERR_COMM too, with which MPI ends a job
    assert process.returncode != NO_TESTS or not NOTHING_CHOSEN.search(out), f"no test is chosen by {arguments}"
    failures = (line for line in out.splitlines() if line.startswith(("FAILED", "ERROR")) or "+ Timeout +" in line)
    return next(failures, f"status {process.returncode}")


def run_tests(folder: Path, tests: str) -> str | None:
    """Run the tests of a Mutant in a copy of the project; return the first failure, or None."""
    for each in tests.split():
        file, _, chosen = each.partition(":")
        is_on_ranks = file.startswith(ON_RANKS)
        options = ["--with-mpi"] if is_on_ranks else ["--deselect", "tests/unit/test_mutants.py"]
        chosen_by = ["-k", chosen] if chosen else []
        arguments = (*PYTEST, *options, *chosen_by, f"tests/{file}")
        failure = run(folder, RANKS if is_on_ranks else 0, *arguments, python=forked.python())
        if failure is not None:
            return f"{each}: {failure}"
    return None


def try_all(mutants: Iterable[tuple[int, Mutant]], judge: Callable[[Path, Mutant], str | None], beside: int = 1) -> int:
    """Try mutants, some at once, each in a copy of its own; print what noticed them, and return how many survive."""

    def attempt(numbered: tuple[int, Mutant]) -> bool:
        number, mutant = numbered
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            copy_project(folder)
            path = folder / "src" / mutant.file
            assert mutant.occurs(folder) == 1, f"{number} {mutant.name} occurs {mutant.occurs(folder)} times"
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
            began = time.monotonic()
            caught = judge(folder, mutant)
            seconds = time.monotonic() - began
        print(f"{number:2d} {mutant.name}: {caught or 'SURVIVES'} ({seconds:.0f} s)", flush=True)
        return caught is None

    with ThreadPoolExecutor(beside) as pool:
        return sum(pool.map(attempt, mutants))


def main(arguments: list[str]) -> int:
    """Try the mutants and return the exit status."""
    beside = 1
    if arguments[:1] == ["--beside"]:
        beside, arguments = int(arguments[1]), arguments[2:]
    numbers = [int(each) for each in arguments] or list(range(len(MUTANTS)))
    if not arguments:
        with tempfile.TemporaryDirectory() as temporary:
            copy_project(Path(temporary))
            for tests in sorted({file for each in MUTANTS for file in each.tests.split()}):
                if failure := run_tests(Path(temporary), tests):
                    sys.exit(f"the tests fail without a mutant: {failure}")
    survivors = try_all(
        ((number, MUTANTS[number]) for number in numbers),
        lambda folder, mutant: run_tests(folder, mutant.tests),
        beside,
    )
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
