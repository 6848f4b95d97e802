"""The lines that the mutants break are still there: a table that no longer fits breaks nothing, and proves nothing."""

from __future__ import annotations

from tests import mutants
from tests.emulated_gpu import mutants as of_nccl


def test_each_line_occurs_once() -> None:
    tables = {"tests/mutants.py": mutants.MUTANTS, "tests/emulated_gpu/mutants.py": of_nccl.MUTANTS}
    wrong = [
        f"{table}: {mutant.old!r} occurs {count} times in src/{mutant.file}"
        for table, listed in tables.items()
        for mutant in listed
        if (count := mutant.occurs(mutants.ROOT)) != 1
    ]
    assert not wrong, "after a change to these lines the table must follow:\n" + "\n".join(wrong)


def test_the_tests_of_each_are_there() -> None:
    named = {each.partition(":")[0] for mutant in mutants.MUTANTS for each in mutant.tests.split()}
    assert [each for each in sorted(named) if not (mutants.ROOT / "tests" / each).is_file()] == []
