"""Network between nodes: whether every node reaches every other, by its name and on each of its addresses.

The first rank of each node listens on a free port, for TCP and for UDP; the first ranks of the others connect and must
read that listener's word, and send a datagram and must get it back.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hpcdist as dist
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.core.waiting import readable
from hpcdist.launch import addresses, environment

TITLE = "Network between nodes"
SECONDS = 2.0
AGAIN_SECONDS = 0.5  # a datagram without an answer for so long is sent again: it may have been lost
AT_ONCE = 32


@contextlib.contextmanager
def listening(word: bytes) -> Iterator[tuple[int, int]]:
    """Send ``word`` to whoever connects, and every datagram back; yield the ports of TCP and of UDP."""
    server = socket.create_server(("", 0), backlog=1024)
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("", 0))
    ended = threading.Event()
    for each in server, echo:
        each.setblocking(False)

    def serve() -> None:
        while not ended.is_set():
            ready = readable([server, echo], 0.2)
            with contextlib.suppress(OSError):
                if server in ready:
                    with server.accept()[0] as client:
                        client.sendall(word)
                if echo in ready:
                    echo.sendto(*echo.recvfrom(64))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1], echo.getsockname()[1]
    finally:
        ended.set()
        thread.join()
        server.close()
        echo.close()


def connect(host: str, port: int, word: bytes) -> str | float:
    """Connect and read the word; return the milliseconds it took, or what went wrong."""
    start = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=SECONDS) as link:
            said = b""
            while len(said) < len(word) and (part := link.recv(64)):
                said += part
    except OSError as error:
        return str(error)
    return (time.perf_counter() - start) * 1e3 if said == word else "somebody else answers there"


def exchange(host: str, port: int, word: bytes) -> str | float:
    """Send a datagram and get it back; return the milliseconds it took, or what went wrong."""
    start = time.perf_counter()
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as link:
            link.settimeout(AGAIN_SECONDS)
            while time.perf_counter() < start + SECONDS:
                link.sendto(word, address)
                with contextlib.suppress(TimeoutError):
                    if link.recvfrom(64)[0] == word:
                        return (time.perf_counter() - start) * 1e3
    except OSError as error:
        return str(error)
    return f"no answer in {SECONDS:g} s"


def at_once(call: Callable[..., str | float], targets: list[Any]) -> list[str | float]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda target: call(*target), targets))


def look() -> Facts:
    rank, size = dist.get_rank(), dist.get_world_size()
    keys: list[str] = [""] * size
    dist.all_gather_object(keys, environment.node_key())
    leads = keys.index(keys[rank]) == rank
    interfaces = addresses.interfaces()
    mine = {"host": socket.gethostname(), "interfaces": interfaces} if leads else None
    facts: Facts = {
        "node": keys[rank],
        "interfaces": interfaces,
        "named": addresses.named(),  # what this host's name means on this host
        "tried": [],
        "failed": [],
        "datagrams": [],  # node, address, milliseconds or what went wrong
    }
    if len(set(keys)) == 1:
        return facts
    word = secrets.token_hex(16).encode()
    with listening(word) if leads else contextlib.nullcontext((0, 0)) as (port, echo):
        cards: list[Facts | None] = [None] * size
        card = {**mine, "port": port, "echo": echo, "word": word, "node": keys[rank]} if mine else None
        dist.all_gather_object(cards, card)
        if leads:
            others = [card for card in cards if card is not None and card["node"] != keys[rank]]
            targets = [
                (card["node"], how, host, card["port"], card["word"])
                for card in others
                for how, host in {"name": card["host"], **card["interfaces"]}.items()
            ]
            for target, result in zip(targets, at_once(connect, [each[2:] for each in targets]), strict=True):
                (facts["failed"] if isinstance(result, str) else facts["tried"]).append((*target[:3], result))
            reached = {(node, host) for node, how, host, _ in facts["tried"] if how != "name"}
            echoes = [
                (card["node"], host, card["echo"], card["word"])
                for card in others
                for host in card["interfaces"].values()
                if (card["node"], host) in reached
            ]
            results = at_once(exchange, [each[1:] for each in echoes])
            facts["datagrams"] = [(*target[:2], result) for target, result in zip(echoes, results, strict=True)]
        dist.barrier()
    return facts


def judge(ranks: list[Facts]) -> Iterator[Finding]:
    seen = [facts["network"] for facts in ranks]
    first = seen[0]["interfaces"]
    shown = ", ".join(f"{name} {address}" for name, address in first.items()) or "only the loopback"
    yield Finding(NOTE, f"interfaces of rank 0's node: {shown}")
    nodes = {facts["node"] for facts in seen}
    if len(nodes) == 1:
        yield Finding(NOTE, "one node: no pairs to try")
        return
    failed = [(facts["node"], *each) for facts in seen for each in facts["failed"]]
    by_name = [each for each in failed if each[2] == "name"]
    tried = [each for facts in seen for each in facts["tried"]]
    if by_name:
        here, there, _, host, why = by_name[0]
        yield Finding(
            PROBLEM,
            f"{len(by_name)} pairs of nodes do not meet under the host's name, such as {here} to {there}: {why}",
            f"getent hosts {host}; nc -vz {host} PORT   # names, routes and firewall between compute nodes",
        )
    for here, there, how, host, why in [each for each in failed if each[2] != "name"][:4]:
        remedy = (
            f"export GLOO_SOCKET_IFNAME=NAME NCCL_SOCKET_IFNAME=NAME   # an interface that all nodes reach, not {how}"
        )
        yield Finding(ADVICE, f"{here} does not reach {there} on {how} ({host}): {why}", remedy)
    yield from judge_names(seen)
    if not by_name:
        pairs, slowest = len(nodes) * (len(nodes) - 1), max(each[3] for each in tried)
        yield Finding(
            OK,
            f"all {pairs} directed pairs of {len(nodes)} nodes meet, {len(tried)} connections, "
            f"slowest {slowest:.1f} ms",
        )
    yield from judge_datagrams(seen)


def judge_names(seen: list[Facts]) -> Iterator[Finding]:
    wrong = {
        facts["node"]: facts["named"][0]
        for facts in seen
        if facts["named"] and all(map(addresses.is_loopback, facts["named"]))
    }
    if not wrong:
        return
    node, address = next(iter(wrong.items()))
    more = f", and so on {len(wrong)} nodes" if len(wrong) > 1 else ""
    interface = next(iter(seen[0]["interfaces"]), "NAME")
    yield Finding(
        ADVICE,
        f"the name {node} means the loopback ({address}) on that node itself{more}; hpcdist takes the addresses of "
        "the interfaces instead, but a program that listens at its host's name, torch's gloo too, is not reached",
        f"export {addresses.CHOICE}={interface}   # or the node's own address in its /etc/hosts for {address}",
    )


def judge_datagrams(seen: list[Facts]) -> Iterator[Finding]:
    """Say which pairs of nodes exchange no datagrams, on any of the addresses under which they meet by TCP."""
    reached: dict[tuple[str, str], list[str | float]] = defaultdict(list)
    for facts in seen:
        for node, _, result in facts["datagrams"]:
            reached[facts["node"], node].append(result)
    silent = {pair: said[0] for pair, said in reached.items() if all(isinstance(each, str) for each in said)}
    if silent:
        (here, there), why = next(iter(silent.items()))
        yield Finding(
            PROBLEM,
            f"{len(silent)} of {len(reached)} directed pairs of nodes that meet by TCP exchange no UDP datagrams, such "
            f"as {here} and {there}: {why}; a rank that hangs there cannot be asked where it is, and a death there is "
            "not noticed",
            "nft list ruleset   # open UDP between compute nodes, all ports: each rank's watchdog has one of its own",
        )
    elif reached:
        yield Finding(OK, f"{len(reached)} directed pairs exchange UDP datagrams too")
