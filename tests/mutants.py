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
NO_TESTS, NOTHING_CHOSEN = (5, re.compile(r"no tests ran|^\d+ deselected", re.MULTILINE))  # pytest's
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


class Lines(NamedTuple):
    """Lines of one file that the same tests guard."""

    file: str
    tests: str

    def broken(self, *pairs: tuple[str, str]) -> list[Mutant]:
        """Return the mutants in which the first of each pair is replaced by the second."""
        return [Mutant(self.file, old, new, self.tests) for old, new in pairs]


CORE, MPI_BACKEND, NODE = "hpcdist/core", "hpcdist/backends/mpi", "hpcdist/backends/mpi/node"
C10D, WATCH, TCP = "hpcdist/c10d", "hpcdist/watch", "stores/tcp"
QUEUE, WORK, ISSUE, BUFFERS, CACHE = (
    f"{CORE}/{each}.py" for each in ("queue", "work", "issue", "buffers", "call_cache")
)
IN_QUEUE = "unit/test_core_queue.py mpi/test_random_programs.py"
BESIDE_CACHE = "mpi/test_repetition.py mpi/test_random_programs.py:loop"
WINDOW = "mpi/test_shared_memory.py"

MUTANTS = [
    # -- core.queue: order of calls, and what a Work may be used again for
    *Lines(QUEUE, IN_QUEUE).broken(
        (
            "        if self.carrier is not None and self.carrier == get_ident():\n            self._follow(work)\n",
            "        if False:\n            self._follow(work)\n",
        ),
        ("            raise self._given_up()\n        self._calls", "            pass\n        self._calls"),
        ("(self._calls or self._turn.locked()) and self.carrier", "self._calls and self.carrier"),
        ("        if self.broken is not None:  # the watchdog", "        if False:  # also"),
        ("        for work in list(self._calls):\n", "        for work in ():\n"),
        ("        if self.unseen is not None:\n            work", "        if False:\n            work"),
        ("        if self.unseen is not None:\n            raise self.see(self.unseen)\n\n    def", "\n    def"),
        ("            self._thread.join()\n", "            pass\n"),
        ("        for work in self.pending():\n            work._finish(error)\n", ""),
        ("    if modes == (is_inf", "    if True or modes == (is_inf"),
        (
            "                self._stolen = work = calls[0]\n",
            "                calls.rotate(1)\n                self._stolen = work = calls[0]\n",
        ),
        (
            "            self.running = self._calls[0]\n",
            "            self._calls.rotate(1)\n            self.running = self._calls[0]\n",
        ),
        ("                raise  # Ctrl-C", "                pass  # Ctrl-C"),
    ),
    *Lines(CACHE, "unit/test_core_plans.py").broken(
        ("if any(each.is_inference() for each in tensors) else run", "if False else run")
    ),
    # -- core.work: the end of a call is told once, with its error
    *Lines(WORK, IN_QUEUE).broken(
        ("        if self._done:  # already ended", "        if False:  # a call that was"),
        ("            raise self._error\n        return True\n", "        return True\n"),
    ),
    *Lines(WORK, f"{IN_QUEUE} mpi/test_async.py").broken(
        (
            "        self._is_asked = True\n        if self._done:\n            self._tell()\n",
            "        self._is_asked = True\n",
        )
    ),
    # -- core.issue: what a call that comes again must have in common, and what is checked before anything is sent
    *Lines(ISSUE, BESIDE_CACHE).broken(
        ("known.op is op\n                and known.in_place", "known.in_place"),
        (
            "kind = row if root is None and counts is None else (row, root)\n",
            "kind = row if root is None and counts is None else (row, 0)\n",
        ),
    ),
    *Lines(f"{CORE}/call_cache.py", BESIDE_CACHE).broken(
        ("            and fits(send.numel(), recv.numel(), ranks)\n", ""),
        ("            and len(set(map(NBYTES, tensors))) == 1\n", ""),
    ),
    *Lines(ISSUE, BESIDE_CACHE).broken(("                and known.in_place is (recv is send)\n", "")),
    *Lines(ISSUE, "unit/test_journal.py").broken(
        ("                    journal.retract(record)\n                    raise\n", "                    raise\n"),
        ("        backend.check_reduction(row, either.dtype, op)\n", ""),
    ),
    *Lines(ISSUE, "mpi/test_random_programs.py mpi/test_async.py").broken(
        ("                elif backend.queue is not None:\n                    backend.queue.drain()\n", ""),
        (
            "            backend.settle()  # a queued call may still write to what is copied here\n",
            "            pass\n",
        ),
        ("    if not is_async and backend.queue is not None:\n", "    if False:\n"),
    ),
    *Lines(ISSUE, "mpi/test_bad_input.py").broken(
        (
            "        if not (in_place and row.is_in_place) and not is_shaped(row, pg, given, output, counts):\n",
            "        if False:\n",
        )
    ),
    *Lines(ISSUE, "mpi/test_calls_differ.py").broken(
        (
            "        if not (in_place and row.is_in_place) and not is_shaped(row, pg, given, output, counts):\n",
            "        if not in_place and not is_shaped(row, pg, given, output, counts):\n",
        )
    ),
    *Lines(f"{MPI_BACKEND}/repetition.py", "mpi/test_calls_differ.py").broken(
        ("((seen := theirs[at]) != word or wide)", "(seen := theirs[at]) != word")
    ),
    *Lines(f"{CORE}/call_words.py", "mpi/test_calls_differ.py:several").broken(
        ("    if call.counts is not None and call.row is ALL_REDUCE:\n", "    if False:\n")
    ),
    *Lines(f"{MPI_BACKEND}/call_check.py", "unit/test_call_check.py").broken(
        ("            board.forget(self._start)", "            pass"),
        ("                if not self.is_clear(number):\n", "                if False:\n"),
    ),
    *Lines(f"{CORE}/call_log.py", "unit/test_call_log.py").broken(
        ("                self.add(LEAVE_SAID, 0)\n", "                pass\n"),
        ("        if self.failure is not None:\n            self.check()\n        number", "        number"),
    ),
    *Lines("hpcdist/backends/torch_c10d.py", "faults/test_call_check.py:gloo").broken(
        ("        self.record(call)\n", ""),
        ("                self.calls.compare_failed()\n", "                pass\n"),
    ),
    # -- core.buffers: the caller's memory
    *Lines(BUFFERS, "mpi/test_bad_input.py").broken(
        ("        if writable and not value.flags.writeable:\n", "        if False:\n"),
        ("    if sum(splits) != rows or min", "    if min"),
    ),
    *Lines(BUFFERS, "unit/test_core_buffers.py mpi/test_random_programs.py").broken(
        ("    return first < second + other.nbytes and second < first + one.nbytes\n", "    return False\n")
    ),
    *Lines(BUFFERS, "unit/test_core_buffers.py").broken(
        ("        if tensor.nbytes != like.nbytes:", "        if False:")
    ),
    # -- core: agreement of ranks
    *Lines(f"{CORE}/agreement.py", "mpi/test_agreement.py").broken(
        ("    if len(set(backend.objects.all_gather(digest, call=call))) == 1:\n        return\n", "    return\n")
    ),
    *Lines(f"{CORE}/agreement.py", "mpi/test_objects.py mpi/test_window.py mpi/test_node_shared.py").broken(
        ("        if text:\n            kind", "        if False:\n            kind")
    ),
    *Lines(f"{CORE}/objects.py", "mpi/test_objects.py").broken(
        ("        return UNPICKLABLE + json.dumps([rank, reason]).encode(), [], error\n", "        raise\n"),
        ("    if weights_only:\n        raise pickle", "    if False:\n        raise pickle"),
    ),
    *Lines(f"{CORE}/objects.py", "mpi/test_objects.py:interrupted").broken(
        ("    except BaseException as error:", "    except Exception as error:")
    ),
    # -- backends.mpi: messages under way
    *Lines(
        f"{MPI_BACKEND}/point_to_point.py", "mpi/test_point_to_point.py mpi/test_async.py torch/test_lifetimes.py"
    ).broken(("        unfinished[self] = None\n", "")),
    *Lines(
        f"{MPI_BACKEND}/point_to_point.py",
        "mpi/test_point_to_point.py mpi/test_groups.py unit/test_mpi_progress.py faults/test_threads.py",
    ).broken(("            if self._reason is not None and self._status.Is_cancelled():\n", "            if False:\n")),
    # Open MPI copes with memory that overlaps; with MPICH's environment the test notices
    *Lines(f"{MPI_BACKEND}/collectives.py", "mpi/test_random_programs.py").broken(
        ("            if recv is not None and overlap(send, recv):\n                send = send.clone()\n", "")
    ),
    *Lines(f"{MPI_BACKEND}/communicator.py", "mpi/test_shared_memory_in_groups.py").broken(
        ("        if self.left_by is not None:\n", "        if False:\n")
    ),
    *Lines(
        f"{MPI_BACKEND}/communicator.py",
        "mpi/test_shared_memory_in_groups.py mpi/test_between_nodes.py faults/test_survival.py",
    ).broken(
        (
            "            self.revoke()  # later calls depend on whether it is revoked, which is the same on all ranks\n"
            "            raise DistBackendError(self.interruption)\n",
            "            pass\n",
        )
    ),
    *Lines(f"{MPI_BACKEND}/retired.py", "mpi/test_point_to_point.py mpi/test_lifecycle.py").broken(
        ("        if not has_messages:\n            comm.Free()\n", "        comm.Free()\n"),
        ("    if unfinished:\n        return False\n", ""),
        ("        RETIRED.append((unfinished, None))\n", "        pass\n"),
    ),
    *Lines(f"{MPI_BACKEND}/receives.py", "mpi/test_point_to_point.py").broken(
        (
            "                    if any(earlier.takes(source, tag) for earlier in self.waiting[:index]):\n",
            "                    if False:\n",
        ),
        (
            "                if not any(each.takes(source, tag) for each in self.waiting):\n",
            "                if True:\n",
        ),
    ),
    *Lines(BUFFERS, "mpi/test_point_to_point.py").broken(
        ("        return copy, partial(free.append, copy)\n", "        free.append(copy)\n        return copy, None\n"),
        ("            tensor.copy_(copy)\n            free.append(copy)\n", "            free.append(copy)\n"),
    ),
    # -- the window of a node: who may write where, and when
    *Lines(f"{NODE}/collectives.py", WINDOW).broken(
        ("            if c < SLOTS:\n                window.wait(window.free[slot])\n", ""),
        ("            window.wait(step)\n            done = reduce(", "            done = reduce("),
        ("            window.wait(step)\n            for owner", "            for owner"),
    ),
    *Lines(f"{NODE}/window.py", WINDOW).broken(
        ("            self.wait(self.free[turn])\n            put(", "            put("),
        ("            self.wait(step)\n            get(", "            get("),
        ("            self.free[turn] = step + 2\n", "            self.free[turn] = 0\n"),
        ("        if failures:\n            raise R", "        if failure:\n            raise R"),
    ),
    # -- c10d: barriers that are monitored, calls that are joined
    *Lines(f"{C10D}/monitored.py", "mpi/test_groups.py").broken(
        ("        if message.call != call:  # it came too late for an earlier call\n            continue\n", ""),
        ("        elif sequence <= message.sequence:", "        else:"),
    ),
    *Lines(f"{C10D}/coalescing.py", "mpi/test_coalescing.py").broken(
        ("return op if op.__class__", "return ReduceOp.SUM if op.__class__"),
        ("    if pg.coalescing is not None:\n        raise", "    if False:\n        raise"),
        ("groupby(held, lambda", "groupby(sorted(held, key=lambda each: common_op(each[0]) is not None), lambda"),
    ),
    # -- watch: whether and when a call is ended, and what proves a death
    *Lines(f"{WATCH}/escalation.py", "unit/test_watch_states.py").broken(
        ("    if was_interrupted:\n", "    if True:\n")
    ),
    *Lines(f"{WATCH}/calls_under_way.py", "unit/test_watch_states.py").broken(
        ("known.get(id(made.record), made)", "made"),
        (
            "        if self.state is State.RUNNING and now - self.first_seen >= limit:\n",
            "        if self.state is State.RUNNING:\n",
        ),
        ("        self.state, self.since = State.DUE, now\n", "        self.state = State.DUE\n"),
    ),
    *Lines(f"{WATCH}/watchdog.py", "faults/test_asking.py").broken(
        ("        elif now >= self.reports.turn(collective, each.group.rank(), each.since):\n", "        else:\n")
    ),
    *Lines(f"{WATCH}/liveness.py", "unit/test_proof_of_death.py").broken(
        (" if error == errno.ECONNREFUSED}", " if error}"), (" if found.get(each) == 0]", "]")
    ),
    *Lines(f"{WATCH}/question.py", "unit/test_many_ranks.py").broken(
        ("parts_of(sorted(part - {rank}))", "{}"), ("for rank in late[:FAN]:", "for rank in late:")
    ),
    *Lines(f"{WATCH}/channel.py", "unit/test_many_ranks.py").broken(
        ('if message["numbering"] != self.numbering:', "if False:")
    ),
    # -- stores
    *Lines("stores/keep_alive.py", "stores/test_keep_alive.py:stays_kept").broken(
        ("sys.getrefcount(looked_at[0]) > _OWN or ", "")
    ),
    *Lines(f"{TCP}/session.py", "stores/test_slow_server.py").broken(
        ("            self.connection = None\n            if connection is not None:\n", "            if False:\n"),
        ("            if connection.limit != limit:\n                connection.set_limit(limit)\n", ""),
    ),
    *Lines(f"{TCP}/session.py", "stores/test_tcp_store.py:fork").broken(
        (
            "        session.lock, session.guard = threading.Lock(), threading.Lock()\n"
            "        session.queue = deque()\n        session.close()\n",
            "        pass\n",
        )
    ),
    *Lines(f"{TCP}/session.py", "stores/test_shared_client.py:limits_of").broken(
        ("each.limit != limit or size", "size")
    ),
    *Lines(f"{TCP}/session.py", "stores/test_shared_client.py:free_connection").broken(
        (
            "            if request.has_connection:\n                self._hand_on()\n            raise\n",
            "            raise\n",
        )
    ),
    *Lines(f"{TCP}/session.py", "stores/test_shared_client.py:refuses").broken(
        ("isinstance(error, ServerClosedError)", "False")
    ),
    *Lines(f"{TCP}/session.py", "stores/test_shared_client.py:interrupt").broken(
        ("if threading.current_thread() is threading.main_thread():", "if False:")
    ),
    *Lines(f"{TCP}/session.py", "stores/test_slow_server.py stores/test_tcp_store.py").broken(
        ("                if is_in_step and len", "                if len")
    ),
    *Lines(f"{TCP}/session.py", "stores/test_tcp_store.py:server_would_refuse").broken(
        ("        if (size := max(sizes)) > MAX_VALUE:\n", "        if False:\n")
    ),
    *Lines(f"{TCP}/wire.py", "stores/test_tcp_store.py:others_proof").broken(
        ('"hpcdist-store-1 " + role + server_nonce', '"hpcdist-store-1 " + server_nonce')
    ),
    *Lines(f"{TCP}/server/requests.py", "stores/test_attacks.py").broken(
        ("        if size > limit:\n", "        if False:\n")
    ),
    *Lines("stores/hash_store.py", "stores/test_hash_store.py").broken(
        ("        self._data.update(pairs)\n        self._changed.notify_all()\n", "        self._data.update(pairs)\n")
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
