"""Can every node reach every other, under its name and on each of its addresses?

The first rank of each node listens on a free port; the first ranks of the others connect and must read that
listener's word.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import hpcdist as dist
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.launch import environment

TITLE = "Network between nodes"
SIOCGIFADDR = 0x8915  # linux/sockios.h
SECONDS = 2.0
AT_ONCE = 32


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, less the loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                address = socket.inet_ntoa(answer[20:24])
                if not address.startswith("127."):
                    found[name] = address
    return found


@contextlib.contextmanager
def listening(word: bytes) -> Iterator[int]:
    """Say ``word`` to whoever connects to the port that is yielded."""
    server = socket.create_server(("", 0), backlog=1024)
    ended = threading.Event()
    server.settimeout(0.2)

    def serve() -> None:
        while not ended.is_set():
            try:
                client, _ = server.accept()
            except OSError:
                continue
            with client, contextlib.suppress(OSError):
                client.sendall(word)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        ended.set()
        thread.join()
        server.close()


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


def look() -> Facts:
    """Try all pairs of nodes; every rank calls this."""
    rank, size = dist.get_rank(), dist.get_world_size()
    keys: list[str] = [""] * size
    dist.all_gather_object(keys, environment.node_key())
    leads = keys.index(keys[rank]) == rank
    mine = {"host": socket.gethostname(), "interfaces": interfaces()} if leads else None
    facts: Facts = {"node": keys[rank], "interfaces": interfaces(), "tried": [], "failed": []}
    if len(set(keys)) == 1:
        return facts
    word = secrets.token_hex(16).encode()
    with listening(word) if leads else contextlib.nullcontext(0) as port:
        cards: list[Facts | None] = [None] * size
        dist.all_gather_object(cards, {**mine, "port": port, "word": word, "node": keys[rank]} if mine else None)
        if leads:
            targets = [
                (card["node"], how, host, card["port"], card["word"])
                for card in cards
                if card is not None and card["node"] != keys[rank]
                for how, host in {"name": card["host"], **card["interfaces"]}.items()
            ]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                results = list(pool.map(lambda target: connect(*target[2:]), targets))
            for (node, how, host, *_), result in zip(targets, results, strict=True):
                (facts["failed"] if isinstance(result, str) else facts["tried"]).append((node, how, host, result))
        dist.barrier()
    return facts


def judge(ranks: list[Facts]) -> list[Finding]:
    """Say which pairs do not reach each other."""
    seen = [facts["network"] for facts in ranks]
    first = seen[0]["interfaces"]
    shown = ", ".join(f"{name} {address}" for name, address in first.items()) or "the loopback alone"
    findings = [Finding(NOTE, f"interfaces of rank 0's node: {shown}")]
    nodes = {facts["node"] for facts in seen}
    if len(nodes) == 1:
        return [*findings, Finding(NOTE, "one node: no pairs to try")]
    failed = [(facts["node"], *each) for facts in seen for each in facts["failed"]]
    by_name = [each for each in failed if each[2] == "name"]
    tried = [each for facts in seen for each in facts["tried"]]
    if by_name:
        here, there, _, host, why = by_name[0]
        findings.append(
            Finding(
                PROBLEM,
                f"{len(by_name)} pairs of nodes do not meet under the host's name, such as {here} to {there}: {why}",
                f"getent hosts {host}; nc -vz {host} PORT   # names, routes and firewall between compute nodes",
            )
        )
    for here, there, how, host, why in [each for each in failed if each[2] != "name"][:4]:
        mend = (
            f"export GLOO_SOCKET_IFNAME=NAME NCCL_SOCKET_IFNAME=NAME   # an interface that all nodes reach, not {how}"
        )
        findings.append(Finding(ADVICE, f"{here} does not reach {there} on {how} ({host}): {why}", mend))
    if not by_name:
        slowest = max(each[3] for each in tried)
        pairs = len(nodes) * (len(nodes) - 1)
        text = (
            f"all {pairs} directed pairs of {len(nodes)} nodes meet, {len(tried)} connections, slowest {slowest:.1f} ms"
        )
        findings.append(Finding(OK, text))
    return findings
