"""The page of errors beside the code: each message that the code makes has an entry, and each entry has a message.

A message is the text given to an exception or a warning, or as the reason for which calls are ended. What is put into
it at run time is ``…``.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

from hpcdist.cli import explain
from hpcdist.core import errors
from hpcdist_stores import errors as stores_errors

SRC = Path(__file__).parents[2] / "src"
BUILTIN = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
OURS = {name for module in (errors, stores_errors) for name in dir(module) if name.endswith("Error")}
NOT_TEXTS = {"NoAnswerError"}  # whose constructor takes the parts of its message
# functions and methods whose text is an exception's, a warning's, or the reason why calls raise
SPEAKERS = {"add_hint", "warn", "abort", "revoke", "revoke_groups", "clear", "interrupt", "_interrupt", "end_receives"}
MADE_BY = (BUILTIN | OURS | SPEAKERS | {"UnpicklingError"}) - NOT_TEXTS
# functions that compose a message for others to raise
COMPOSERS = {"headline", "message", "decide", "find_reason", "abort_on_exception"}
LEFT_OUT = {
    "hpcdist/cli": "commands print their own errors on the command line",
    "stores/tcp/server/requests.py": "ends a client's connection; the client says why that may be",
    "stores/tcp/server/loop.py": "the same",
}
LEAST = 9  # letters without which a text says too little to be found by it

Message = tuple[str, str, str]  # its place, its text, and the name of the entry that it ends with


def text_of(node: ast.AST, names: dict[str, str]) -> str:
    """Return a text as the page writes it; ``names`` are texts that were assigned to names before."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names) if isinstance(node.value, ast.Name) else explain.ANYTHING
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, names) + text_of(node.right, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # a text's own method, such as rstrip
        return text_of(node.func.value, names)
    return names.get(node.id, explain.ANYTHING) if isinstance(node, ast.Name) else explain.ANYTHING


def assigned(nodes: Iterator[ast.AST], names: dict[str, str]) -> dict[str, str]:
    """Return the texts that are assigned to names."""
    return {
        node.targets[0].id: text_of(node.value, names)
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if isinstance(node.value, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.Call))
    }


def messages_of(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, text and entry's name of each message that a module makes."""
    constants = assigned(iter(tree.body), {})
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = constants | assigned(ast.walk(function), constants)
        inner = {
            part
            for each in ast.walk(function)
            if isinstance(each, (ast.JoinedStr, ast.Expr))
            for part in ast.walk(each)
        }
        plain = {each for each in ast.walk(function) if isinstance(each, ast.Constant)} - inner
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                if name in MADE_BY:
                    first, *others = node.args
                    entry = others[0].value if name == "add_hint" and isinstance(others[0], ast.Constant) else ""
                    yield node.lineno, text_of(first, names), entry
                    # OSError, whose text comes second; Watchdog.abort
                    yield from (
                        (node.lineno, text_of(each, names), "")
                        for each in others
                        if name in (BUILTIN | SPEAKERS) - {"add_hint"}
                    )
                elif name == "__init__" and "Error" in ast.dump(tree):  # of a class of ours, by super()
                    yield node.lineno, text_of(node.args[0], names), ""
            elif function.name in COMPOSERS and (isinstance(node, ast.JoinedStr) or node in plain):
                yield node.lineno, text_of(node, names), ""


def messages() -> set[Message]:
    """Return all messages that have words of their own."""
    found = set()
    for file in sorted(SRC.rglob("*.py")):
        place = str(file.relative_to(SRC))
        if place.startswith(tuple(LEFT_OUT)):
            continue
        for line, text, entry in messages_of(ast.parse(file.read_text())):
            if entry or len(re.sub(r"[^A-Za-z]", "", text)) >= LEAST:
                found.add((f"{place}:{line}", " ".join(text.split()), entry))
    return found


MESSAGES = sorted(messages())
ENTRIES = explain.entries()
PATTERNS = [(name, pattern) for name, entry in ENTRIES.items() for pattern in entry.messages]


def test_the_search_finds_messages_of_each_kind():
    """Else an empty list would pass for a complete page."""
    made = """
HINT = "load a module"
def f():
    text = f"no {x} at {y()}: {HINT}"
    raise DistBackendError(add_hint(text, "mpi-not-found"))
def g():
    raise OSError(1, f"second {x}" " text")
"""
    found = {(text, entry) for _, text, entry in messages_of(ast.parse(made))}
    assert {("no … at …: load a module", "mpi-not-found"), ("second … text", "")} <= found
    assert len(MESSAGES) > 230


def test_each_message_has_an_entry():
    wrong = []
    for place, text, named in MESSAGES:
        entry = explain.best(text, ENTRIES) or ENTRIES.get(named)  # what other functions compose has no text here
        if entry is None:
            wrong.append(f"{place}: docs/reference/errors.md has no entry for {text!r}")
        elif named not in (entry.name, ""):
            wrong.append(f"{place} names {named}, and what explains it is {entry.name}")
    assert not wrong, "\n".join(wrong)


def test_each_pattern_is_of_a_message():
    """What the page says is in the code, is said once, and has words enough to be found by."""
    wrong = [
        f"{name}: {pattern}"
        for name, pattern in PATTERNS
        if not any(explain.matches(pattern, text) for _, text, _ in MESSAGES)
        or len(re.sub(r"[^A-Za-z]", "", pattern)) < LEAST
        or [other for other, each in PATTERNS if each == pattern] != [name]
    ]
    assert not wrong, "\n".join(wrong)


def test_each_entry_says_cause_and_fix():
    form = re.compile(r"\*\*Cause\.\*\* .*\n\n\*\*Fix\.\*\* .*[.`]$", flags=re.DOTALL)
    assert not [name for name, entry in ENTRIES.items() if not form.match(entry.text)]
