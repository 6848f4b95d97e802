"""A running job for the command ``debug``: how it is found, asked for its ranks' calls, and shown as text or a page."""

from __future__ import annotations

import os
import secrets
import time
from collections import defaultdict
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, NamedTuple

from hpcdist.cli import web_page
from hpcdist.core.printing import aligned_text, format_size, printable
from hpcdist.core.ranks import format_count, format_ranks
from hpcdist.launch import arrival
from hpcdist.watch import debug_socket, report
from hpcdist.watch.channel import Channel, key_of
from hpcdist.watch.endpoint import Endpoint
from hpcdist.watch.liveness import Liveness
from hpcdist.watch.question import Answers

ANSWER_SECONDS = 1.0
LATE_SECONDS = 1.0  # seconds that others wait in a call before the ranks that have not entered it are called late
RANKS = ("rank", "host", "", "where it is")
GROUPS = ("group", "backend", "ranks", "collectives", "messages", "behind")
CALLS = ("call", "calls", "bytes", "time s", "mean µs", "longest µs", "where")


class Job(NamedTuple):
    """A running job: its program, and the channel to its ranks."""

    program: str
    channel: Channel
    liveness: Liveness


class Picture(NamedTuple):
    """A job at one moment."""

    title: str  # the job and the time
    ranks: list[tuple[str, ...]]  # rows of RANKS
    groups: list[tuple[str, ...]]  # rows of GROUPS
    calls: list[tuple[str, ...]]  # rows of CALLS, of all ranks together
    stacks: dict[int, list[str]]  # the frames of each rank, the innermost first
    late: list[int]  # the ranks for which others wait, or which do not answer


def ask(channel: Channel, ranks: list[int], first: int = -1) -> Answers:
    return channel.ask(ranks, "where", ANSWER_SECONDS, group="", first=first)


def join(program: str, rank: int, endpoint: Endpoint, has_user_key: bool = False) -> Job:
    """Return a job given one of its ranks, which sends the others' addresses; ConnectionError if it does not answer.

    ``has_user_key``: its key is the one that the user has chosen for all ranks.
    """
    channel = Channel()
    channel.learn([rank], [endpoint])
    known: dict[int, Endpoint] = {}
    while True:
        if (answer := ask(channel, [rank], len(known)).get(rank)) is None:
            raise ConnectionError(
                f"no answer from rank {rank} at {endpoint.host}:{endpoint.port}: the job has ended, it was started "
                f"with another {debug_socket.SECRET_VARIABLE}, or UDP is blocked"
            )
        inspected = answer["inspected"]
        known.update((each, Endpoint(*where)) for each, where in inspected["endpoints"])
        if len(known) >= inspected["size"] or not inspected["endpoints"]:
            if has_user_key:
                known = {each: where._replace(key=endpoint.key) for each, where in known.items()}
            channel.learn(known, known.values())
            return Job(printable(program), channel, Liveness(channel))


def find(pid: int | None) -> Job:
    """Return the job on this machine, or in this Slurm allocation; ConnectionError unless there is exactly one."""
    allocation = os.environ.get(debug_socket.SLURM_JOB, "")
    jobs: dict[str, debug_socket.JobRank] = {}
    for found in debug_socket.ranks_on_this_machine():
        if found.endpoint.pid == pid or (pid is None and allocation in ("", found.slurm_job)):
            jobs.setdefault(found.job, found)
    if len(jobs) != 1:
        lines = [f"  --pid {each.endpoint.pid:<8} {printable(each.program)}" for each in jobs.values()]
        lines += [
            f"  process {each.process}, rank {each.rank} of {each.size}, is in init_process_group, waiting for others"
            for each in arrival.arrivals()
        ]
        what = "several jobs of yours run" if jobs else "no job of yours with a group of hpcdist runs"
        raise ConnectionError("\n".join([f"{what} on this machine", *lines]))
    (one,) = jobs.values()
    return join(one.program, one.rank, one.endpoint)


def at(address: str) -> Job:
    """Return the job whose rank 0 listens at ``host:port``; the secret is that of HPCDIST_DEBUG_SECRET."""
    secret, (host, _, port) = os.environ.get(debug_socket.SECRET_VARIABLE, ""), address.rpartition(":")
    if not secret:
        raise ConnectionError(f"set {debug_socket.SECRET_VARIABLE} here to what it was when the job started")
    return join(address, 0, Endpoint((host,), int(port), 0, key_of(secret), 0, "", "", "", host), True)


def look(job: Job) -> Picture:
    endpoints = job.channel.endpoints
    answers = ask(job.channel, sorted(endpoints))
    groups: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    inside: dict[str, int] = {}  # the latest collective of each group in which ranks have waited for a while
    for rank, answer in answers.items():
        for name, each in answer["inspected"]["groups"].items():
            groups[name][rank] = each
        for call in answer["calls"]:
            if not call["message"] and call["seconds"] >= LATE_SECONDS:
                inside[call["group"]] = max(inside.get(call["group"], 0), call["number"])
    behind = {
        name: [rank for rank, each in members.items() if each["collectives"] < inside.get(name, 0)]
        for name, members in groups.items()
    }
    late = sorted({rank for ranks in behind.values() for rank in ranks} | (endpoints.keys() - answers.keys()))
    ranks: list[tuple[str, ...]] = []
    for rank, endpoint in sorted(endpoints.items()):
        where = report.place(answers[rank], "0") if rank in answers else job.liveness.judge(rank)
        ranks.append((f"{rank}", endpoint.host, "LATE" if rank in late else "", where))
    rows: list[tuple[str, ...]] = []
    for name, members in sorted(groups.items()):
        first = next(iter(members.values()))
        counts = (span([each[kind] for each in members.values()]) for kind in ("collectives", "messages"))
        late_ones = format_ranks(behind[name]) if behind[name] else ""
        rows.append((first["label"], first["backend"], f"{first['size']}", *counts, late_ones))
    stacks = {rank: answer["inspected"]["stack"] for rank, answer in sorted(answers.items())}
    title = f"{job.program}, {format_count(len(endpoints), 'rank')}, {time.strftime('%H:%M:%S')}"
    return Picture(title, ranks, rows, tally(answers), stacks, late)


def span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def tally(answers: Answers) -> list[tuple[str, ...]]:
    """Return the calls of all ranks by name and line, those with the most time first."""
    sums: dict[tuple[str, str, bool], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for answer in answers.values():
        for name, line, is_async, calls, nbytes, total, longest in answer["inspected"]["calls"]:
            mine = sums[name, line, is_async]
            mine[:] = mine[0] + calls, mine[1] + nbytes, mine[2] + total, max(mine[3], longest)
    rows: list[tuple[str, ...]] = []
    for (name, line, is_async), (calls, nbytes, total, longest) in sorted(sums.items(), key=lambda each: -each[1][2]):
        times = f"{total / 1e9 / len(answers):.3f}", f"{total / calls / 1e3:.1f}", f"{longest / 1e3:.1f}"
        rows.append((f"{name}{' async' * is_async}", f"{calls}", format_size(nbytes), *times, line))
    return rows


def tables(picture: Picture) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    found = [("Ranks", RANKS, picture.ranks), ("Groups", GROUPS, picture.groups), ("Calls", CALLS, picture.calls)]
    return [each for each in found if each[-1]]


def as_text(picture: Picture, shows_all: bool) -> str:
    """Return a picture for the terminal: the stacks of the late ranks, or of all."""
    parts = [picture.title]
    parts += [aligned_text([columns, *rows], set(range(len(columns)))) for _, columns, rows in tables(picture)]
    for rank, frames in picture.stacks.items():
        if shows_all or rank in picture.late:
            parts.append("\n".join([f"stack of rank {rank}:", *(f"  {frame}" for frame in frames)]))
    return printable("\n\n".join(parts))


def as_html(picture: Picture, seconds: float | None) -> str:
    """Return a picture as a page, which a browser reloads after some seconds."""
    late = {f"{rank}" for rank in picture.late}
    parts = []
    for title, columns, rows in tables(picture):
        cells = [[escape(each) for each in row] for row in rows]
        if columns is RANKS:
            cells = [[f"<span class=late>{each}</span>" for each in row] if row[0] in late else row for row in cells]
        parts.append(web_page.section(title, web_page.table(columns, cells, is_of_words=True)))
    stacks = []
    for rank, frames in picture.stacks.items():
        stack = escape("\n".join(frames))
        is_open = " open" if rank in picture.late else ""
        stacks.append(f"<details{is_open}><summary>rank {rank}</summary><pre>{stack}</pre></details>")
    return web_page.page(picture.title, [*parts, web_page.section("Stacks", *stacks)], seconds)


def serve(job: Job, port: int, seconds: float) -> None:
    """Serve the page on this machine's loopback address, at a secret path that is printed, until Ctrl-C."""
    path = f"/{secrets.token_urlsafe(16)}"
    looking = Lock()  # each request has a thread, and one at a time may ask

    class Page(BaseHTTPRequestHandler):
        """The page, which shows the job at the time of each request."""

        def do_GET(self) -> None:
            is_known = secrets.compare_digest(self.path.encode(), path.encode())
            with looking:
                text = as_html(look(job), seconds).encode() if is_known else b""
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Page) as server:
        print(f"http://127.0.0.1:{server.server_port}{path}", flush=True)
        server.serve_forever()
