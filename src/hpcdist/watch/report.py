"""Report of a call that has not ended: which call it is, and where each rank of its group is instead.

A rank that gives no answer is said to be outside the call only if its process is known to have ended or to be stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpcdist.core.ranks import listed
from hpcdist.watch.liveness import NO_ANSWER, NOBODY_ANSWERS

if TYPE_CHECKING:  # the command debug needs no torch
    from hpcdist.watch.calls_under_way import UnderWay

Answers = dict[int, dict[str, Any]]  # what ranks said, by rank

CALL = {
    **dict.fromkeys(("group", "label", "name", "dtype", "where", "state"), str),
    **dict.fromkeys(("message", "background"), bool),
    "number": int,
    "peer": (int, None),
    "shape": ([int], None),
    "seconds": (int, float),
    "ranks": [int],
}
WHERE = {"entered": (int, None), "calls": [CALL], "main": str, "leaving": bool, "left": bool}  # shape of an answer


def label(group: str, description: str) -> str:
    """Return how a report calls a group: by what it is for, where the user said so."""
    return f"group '{group}'" if description in ("", "undefined", "default_pg") else f"group '{description}'"


def title(call: dict[str, Any]) -> str:
    """Return a call as ``all_reduce #128``, a message with its peer."""
    if not call["message"]:
        return f"{call['name']} #{call['number']}"
    is_incoming = "recv" in call["name"] or call["name"] == "Window.get"
    if call["peer"] is None:
        return f"{call['name']} from anyone" if is_incoming else call["name"]
    return f"{call['name']} {'from' if is_incoming else 'to'} rank {call['peer']}"


def described(each: UnderWay, seconds: float, where: str) -> dict[str, Any]:
    """Return a call under way as ranks tell each other."""
    group, call = each.group, each.call
    peer = group.ranks[call.root] if call.is_message and call.root is not None else None
    return {
        "group": group.group_name,
        "label": label(group.group_name, group.group_desc),
        "name": call.name,
        "number": call.number,
        "message": call.is_message,
        "peer": peer,
        "shape": None if call.shape is None else list(call.shape),
        "dtype": "" if call.dtype is None else str(call.dtype).removeprefix("torch."),
        "seconds": round(seconds, 1),
        "where": where,
        "background": each.in_background,
    }


def place(answer: dict[str, Any], group: str) -> str:
    """Return in words where a rank is."""
    if answer["calls"]:
        said = []
        for call in answer["calls"]:
            elsewhere = "" if call["group"] == group else f" of {call['label']}"
            said.append(f"in {title(call)}{elsewhere}, {call['where']}, for {call['seconds']:.0f} s")
        return ", and ".join(said)
    if answer["leaving"]:
        return f"leaving the program, {answer['main']}"
    return f"not in a call of hpcdist, at {answer['main']}"


def is_unknown(judged: str) -> bool:
    """Tell whether it is not known where a silent rank is, by what was judged of it."""
    return judged.startswith((NO_ANSWER, NOBODY_ANSWERS))


def collectives(answer: dict[str, Any], group: str) -> list[dict[str, Any]]:
    """Return the calls of a group, messages aside, that a rank says it is in."""
    return [call for call in answer["calls"] if call["group"] == group and not call["message"]]


def compose(
    mine: dict[str, Any], me: int, ranks: Sequence[int], answers: Answers, judge: Callable[[int], str]
) -> list[str]:
    """Return the lines that say where the ranks of a group are.

    Args:
        mine: this rank's call, as ``described``.
        me: this rank, as a global one like all others here.
        ranks: those of the group.
        answers: what the others said.
        judge: says why one gave no answer.
    """
    group, name = mine["group"], title(mine)
    if mine["message"]:
        return compose_message(mine, me, ranks, answers, judge)
    inside, shapes = [me], {(str(mine["shape"]), mine["dtype"]): [me]}
    absent: dict[str, list[int]] = {}
    lines = []
    for rank in ranks:
        if rank == me:
            continue
        answer = answers.get(rank)
        if answer is None:
            absent.setdefault(judge(rank), []).append(rank)
            continue
        same = next((call for call in collectives(answer, group) if call["number"] == mine["number"]), None)
        if same is not None and same["name"] == mine["name"]:
            inside.append(rank)
            shapes.setdefault((str(same["shape"]), same["dtype"]), []).append(rank)
        elif same is not None:
            lines.append(
                f"{listed([rank])} differs: call #{mine['number']} of {mine['label']} is {same['name']} there, "
                f"{same['where']}"
            )
        elif answer["entered"] is not None and answer["entered"] >= mine["number"]:
            lines.append(f"{listed([rank])} has done {name} or a call in its place; it is {place(answer, group)}")
        else:
            absent.setdefault(place(answer, group), []).append(rank)
    for where, missing in absent.items():
        are, have = ("is", "has") if len(missing) == 1 else ("are", "have")
        they = "it" if len(missing) == 1 else "they"
        if is_unknown(where):
            lines.append(f"whether {listed(missing)} {have} entered {name} of {mine['label']} is not known; {where}")
            continue
        said = f"{they} {are} {where}" if where.startswith(("in ", "not in", "leaving")) else where
        lines.append(f"{listed(missing)} {have} not entered {name} of {mine['label']}; {said}")
    if len(shapes) > 1:
        ways = "; ".join(f"{listed(who)}: {dtype} {shape}" for (shape, dtype), who in shapes.items())
        lines.append(f"the tensors differ: {ways}")
    lines.append(f"{listed(inside)} {'is' if len(inside) == 1 else 'are'} in it")
    return lines


def compose_message(
    mine: dict[str, Any], me: int, ranks: Sequence[int], answers: Answers, judge: Callable[[int], str]
) -> list[str]:
    """Return the lines that say where the other side of a message is, or everyone who might be."""
    lines: dict[str, list[int]] = {}
    for rank in [mine["peer"]] if mine["peer"] is not None else [each for each in ranks if each != me]:
        if rank == me:
            lines.setdefault("is this rank itself, which waits", []).append(rank)
            continue
        answer = answers.get(rank)
        if answer is not None:
            where = f"is {place(answer, mine['group'])}"
        else:
            judged = judge(rank)
            where = f"{'may not have' if is_unknown(judged) else 'has not'} met it; {judged}"
        lines.setdefault(where, []).append(rank)
    return [f"{listed(ranks)} {where}" for where, ranks in lines.items()]


def headline(mine: dict[str, Any], timeout: float) -> str:
    """Return the sentence that says what waited; torch's programs look for gloo's words at its beginning."""
    tensor = "" if mine["shape"] is None else f" of {mine['dtype']} {mine['shape']}"
    where = f"{'queued; the main thread is at ' if mine['background'] else 'called at '}{mine['where']}"
    return (
        f"Timed out waiting {timeout * 1000:.0f}ms: {title(mine)}{tensor} on {mine['label']} has not ended after "
        f"{mine['seconds']:.1f} s (the timeout is {timeout:g} s), {where}"
    )
