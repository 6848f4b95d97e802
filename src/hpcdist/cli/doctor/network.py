"""Network between nodes: whether every node reaches every other, by its name and on each of its addresses.

The first rank of each node listens on a free port; the first ranks of the other nodes connect and must read that
listener's word, and ask its watchdog for an answer by UDP.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hpcdist as dist
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.launch import addresses, environment
from hpcdist.watch.watchdog import RUNNING

TITLE = "Network between nodes"
SECONDS = 2.0
AT_ONCE = 32


@contextlib.contextmanager
def listening(word: bytes) -> Iterator[int]:
    """Send ``word`` to each client that connects; yield the port."""
    ended = threading.Event()
    with socket.create_server(("", 0), family=addresses.family(), backlog=1024) as server:
        server.settimeout(0.2)

        def serve() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError), server.accept()[0] as client:
                    client.sendall(word)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            ended.set()
            thread.join()


def connect(host: str, port: int, word: bytes) -> str | float:
    """Connect and read the word; return the time in milliseconds, or the error."""
    start = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=SECONDS) as link, link.makefile("rb") as file:
            said = file.read(len(word))
    except OSError as error:
        return str(error)
    return (time.perf_counter() - start) * 1e3 if said == word else "somebody else answers there"


def look() -> Facts:
    rank, size = dist.get_rank(), dist.get_world_size()
    keys: list[str] = [""] * size
    dist.all_gather_object(keys, environment.node_key())
    leads = keys.index(keys[rank]) == rank
    interfaces = addresses.interfaces()
    facts: Facts = {
        "node": keys[rank],
        "interfaces": interfaces,
        "named": addresses.addresses_of_name(),  # the addresses to which this host resolves its own name
        "tried": [],  # node, interface or "name", address; milliseconds, or the error
        "answered": [],  # the nodes whose watchdogs answered
    }
    if len(set(keys)) == 1:
        return facts
    word = secrets.token_hex(16).encode()
    with listening(word) if leads else contextlib.nullcontext() as port:
        cards: list[Any] = [None] * size
        hosts = {"name": socket.gethostname(), **interfaces}
        dist.all_gather_object(cards, (keys[rank], hosts, port, word) if leads else None)
        if leads:
            others = {each: card for each, card in enumerate(cards) if card is not None and each != rank}
            targets = [(node, *each, *rest) for node, names, *rest in others.values() for each in names.items()]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                results = pool.map(lambda target: connect(*target[2:]), targets)
            facts["tried"] = [(*target[:3], result) for target, result in zip(targets, results, strict=True)]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                answers = pool.map(lambda each: RUNNING[0].channel.ask([each], "here", SECONDS), others)
            facts["answered"] = [keys[each] for found in answers for each in found]
        dist.barrier()
    return facts


def judge(seen: list[Facts]) -> Iterator[Finding]:
    first = seen[0]["interfaces"]
    shown = ", ".join(f"{name} {address}" for name, address in first.items()) or "only the loopback"
    yield Finding(NOTE, f"interfaces of rank 0's node: {shown}")
    nodes = {facts["node"] for facts in seen}
    if len(nodes) == 1:
        yield Finding(NOTE, "one node: no pairs to try")
        return
    tried = [(facts["node"], *each) for facts in seen for each in facts["tried"]]
    failed = [each for each in tried if isinstance(each[4], str)]
    by_name = [each for each in failed if each[2] == "name"]
    for here, there, _, host, why in by_name[:1]:
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
        pairs, times = len(nodes) * (len(nodes) - 1), [each[4] for each in tried if isinstance(each[4], float)]
        made = f"{len(times)} connections, slowest {max(times):.1f} ms"
        yield Finding(OK, f"all {pairs} directed pairs of {len(nodes)} nodes meet, {made}")
    met = dict.fromkeys(each[:2] for each in tried if each[2] != "name" and isinstance(each[4], float))
    answered = {(facts["node"], node) for facts in seen for node in facts["answered"]}
    if silent := [pair for pair in met if pair not in answered]:
        here, there = silent[0]
        yield Finding(
            PROBLEM,
            f"{len(silent)} of {len(met)} directed pairs of nodes that meet by TCP exchange no UDP datagrams, such as "
            f"{here} and {there}: no answer in {SECONDS:g} s; a rank that hangs there cannot be asked where it is, and "
            "a death there is not noticed",
            "nft list ruleset   # open UDP between compute nodes, all ports: each rank's watchdog has one of its own",
        )
    elif met:
        yield Finding(OK, f"{len(met)} directed pairs exchange UDP datagrams too")


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
