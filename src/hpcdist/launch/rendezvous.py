"""Rendezvous: connects the processes of a job by a store that all of them reach (c10d's ``rendezvous``).

Each URL scheme has a handler that opens the store and returns this process's rank. The stores of the package ``stores``
use torch's protocol, so that they can connect to the server of torchrun's agent, and torch's clients to ours.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import ParseResult, parse_qsl, urlparse

from torch.distributed import default_pg_timeout
from torch.distributed.distributed_c10d import Store

import hpcdist_stores as stores
from hpcdist.core.agreement import attempt
from hpcdist.core.errors import DistNetworkError, DistStoreError
from hpcdist.core.printing import add_hint
from hpcdist.core.work import LONGEST_TIMEOUT
from hpcdist.launch import addresses, arrival, environment, slurm_secret, slurm_step
from hpcdist_stores.errors import LostServerError, wait_timeout

Found = tuple[Store, int, int]
Handler = Callable[..., Iterator[Found]]

PORTS = range(20000, 60000)  # the ports at which slurm:// searches a free one
INVITATION, COMPLETE = "world/next", "complete"  # the keys of ``meet``
ONE_TRY = timedelta(seconds=2)  # seconds for a server that may be another job's
LOST_PAUSE = 0.02  # seconds until the next search for a server, after one has ended
OPEN = "open_store"  # the call's name in the journal and in errors
SERVED: list[Store] = []  # the last world's: rank 0 may have destroyed that while other ranks still use the store
CREDENTIAL = "munge"  # the key of a notice
NOTICES: list[Store] = []  # rank 0's, which other ranks may still read
CANDIDATES = 8  # ports that a slurm:// job may use, several so that jobs on one node do not collide


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Found]:
    """Connect the processes of a job (c10d's ``rendezvous``); every process calls this.

    Args:
        url: ``env://``, ``tcp://host:port``, ``file:///path``, ``mpi://`` or ``slurm://``; ``?rank=…&world_size=…``
            may follow.
        rank, world_size: this process's number and the number of processes, if the URL does not have them.
        **kwargs: ``timeout``, a timedelta.

    Returns:
        An iterator whose first item is ``(store, rank, world_size)``.

    Raises:
        RuntimeError: not a string, or an unknown scheme.
        ValueError: a rank, size, address or port is missing.
    """
    if not isinstance(url, (str, bytes)):
        raise RuntimeError(f"`url` must be a string. {type(url)}: {url}")
    parsed = urlparse(str(url))
    if (handler := HANDLERS.get(parsed.scheme)) is None:
        raise RuntimeError(
            f"No rendezvous handler for {parsed.scheme}:// in {url!r} (known: {', '.join(f'{s}://' for s in HANDLERS)})"
        )
    return handler(url, rank=rank, world_size=world_size, **kwargs)


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Register a URL scheme (c10d's ``register_rendezvous_handler``).

    Args:
        scheme: such as ``"http"``.
        handler: takes the URL and the keywords ``rank``, ``world_size``, ``timeout``; yields
            ``(store, rank, world_size)``.

    Raises:
        RuntimeError: the scheme is registered already.
    """
    if scheme in HANDLERS:
        raise RuntimeError(f"Rendezvous handler for {scheme}:// already registered")
    HANDLERS[scheme] = handler


def find(
    launch: environment.Launch | None,
    init_method: str | None,
    store: Store | None,
    rank: int,
    world_size: int,
    timeout: timedelta,
) -> Found:
    """Return the store, rank and size for ``init_process_group`` without an MPI backend; every rank calls.

    The store has a prefix of this world only (see ``meet``).
    """
    if store is not None:
        return meet(store, rank, world_size, timeout), rank, world_size
    if init_method is None:
        init_method = "mpi://" if launch is not None and launch.starts_mpi else "env://"
    deadline = time.monotonic() + min(timeout, LONGEST_TIMEOUT).total_seconds()
    own = query(urlparse(str(init_method)), rank, world_size)[0]
    is_first = 0 in (own, launch.rank if launch is not None else own) and not init_method.startswith("mpi:")
    while True:
        left = max(timedelta(seconds=deadline - time.monotonic()), timedelta(seconds=1))
        try:
            with arrival.report_wait(launch, is_first):
                found, own, size = next(iter(rendezvous(init_method, rank, world_size, timeout=min(left, timeout))))
                return meet(found, own, size, min(left, timeout)), own, size
        except LostServerError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(LOST_PAUSE)


def meet(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return a store under a new prefix, after all ranks of the new world have come; each of them calls.

    A store may outlive its world: torchrun's agent has one for all worlds of its workers, and rank 0's server lives
    until rank 0 has destroyed its world, while another rank may begin the next one already. It would read the keys of
    the earlier world. So rank 0 publishes a new prefix, and removes that key before any rank continues; a rank that
    waits for it at a server that ends (LostServerError) searches for the next server. A rank 0 that was killed has not
    removed its key: the next one finds it, and sends the ranks that wait there on to its own prefix.
    """
    own = f"world/{secrets.token_hex(8)}"
    if size == 1:
        return stores.PrefixStore(own, store)
    if rank > 0:
        deadline = time.monotonic() + timeout.total_seconds()
        store.wait([INVITATION], timeout)
        while not (name := store.get(INVITATION).decode()):  # removed, in a store without ``delete_key``
            if time.monotonic() >= deadline:
                seconds = timeout.total_seconds()
                raise wait_timeout([INVITATION.encode()], seconds, seconds, "the store of the program")
            time.sleep(LOST_PAUSE)
        while name:
            world = stores.PrefixStore(name, store)
            world.set(f"rank {rank}", "")
            world.wait([COMPLETE], timeout)
            name = world.get(COMPLETE).decode()
        return world
    world = stores.PrefixStore(own, store)
    left = store.get(INVITATION).decode() if store.check([INVITATION]) else ""
    store.set(INVITATION, own)
    if left:
        stores.PrefixStore(left, store).set(COMPLETE, own)
    try:
        world.wait([f"rank {other}" for other in range(1, size)], timeout)
    finally:
        try:
            store.delete_key(INVITATION)
        except RuntimeError:  # NotImplementedError too: the program's own store may lack it
            store.set(INVITATION, "")
    world.set(COMPLETE, "")
    return world


def _create_store_from_options(backend_options: Any, rank: int) -> Store:
    """Return the store of an options object that has an ``init_method`` (c10d's private name)."""
    return next(iter(rendezvous(backend_options.init_method, rank, timeout=default_pg_timeout)))[0]


# -- the schemes -------------------------------------------------------------------------------------------


def query(url: ParseResult, rank: int, world_size: int) -> tuple[int, int]:
    """Return rank and size, from the caller or the URL; ValueError if both say them and differ."""
    texts = dict(parse_qsl(url.query))

    def one(name: str, given: int) -> int:
        said = int(texts.get(name, given))
        if given not in (-1, said):
            raise missing(url.scheme, f"{name}={given} was given, and the URL says {name}={said}; give one of them")
        return said

    return one("rank", rank), one("world_size", world_size)


def missing(scheme: str, what: str) -> ValueError:
    return ValueError(
        add_hint(f"Error initializing torch.distributed using {scheme}:// rendezvous: {what}", "rendezvous")
    )


def required(scheme: str, rank: int, world_size: int) -> tuple[int, int]:
    if rank < 0:
        raise missing(scheme, f"rank parameter missing; give rank=, or {scheme}://…?rank=…")
    if world_size < 1:
        raise missing(scheme, f"world size parameter missing; give world_size=, or {scheme}://…?world_size=…")
    if rank >= world_size:
        raise missing(scheme, f"rank {rank} is out of range for world_size {world_size}")
    return rank, world_size


def by_environment(url: str, rank: int, world_size: int, timeout: timedelta = default_pg_timeout) -> Iterator[Found]:
    """Use RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them."""
    rank, world_size = query(urlparse(url), rank, world_size)
    found: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "", "MASTER_PORT": -1}
    for name, value in found.items():
        if value in (-1, ""):  # unless the caller has given it
            if (text := os.environ.get(name)) is None:
                hint = "" if environment.detect() is not None else f"; {environment.NOT_STARTED}"
                raise missing("env", f"environment variable {name} expected, but not set{hint}")
            try:
                found[name] = text if value == "" else int(text)
            except ValueError:
                raise missing("env", f"environment variable {name} is {text!r}, expected a number") from None
    rank, world_size = required("env", found["RANK"], found["WORLD_SIZE"])
    host, port = found["MASTER_ADDR"], found["MASTER_PORT"]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # without TORCHELASTIC_RESTART_COUNT, which differs between nodes: an agent counts its own workers' failures
        yield stores.TCPStore(host, port, timeout=timeout), rank, world_size
    else:
        yield stores.TCPStore(host, port, world_size, rank == 0, timeout, multi_tenant=True), rank, world_size


def by_tcp(url: str, rank: int, world_size: int, timeout: timedelta = default_pg_timeout) -> Iterator[Found]:
    """Use the server that rank 0 opens at the URL's host and port."""
    parsed = urlparse(url)
    rank, world_size = required("tcp", *query(parsed, rank, world_size))
    if not parsed.hostname or not parsed.port:
        raise missing("tcp", f"host and port expected, as in tcp://node1:29500; got {url!r}")
    made = stores.TCPStore(parsed.hostname, parsed.port, world_size, rank == 0, timeout, multi_tenant=True)
    yield made, rank, world_size


def by_file(url: str, rank: int, world_size: int, timeout: timedelta = default_pg_timeout) -> Iterator[Found]:
    parsed = urlparse(url)
    rank, world_size = required("file", *query(parsed, rank, world_size))
    if not parsed.path or parsed.netloc:
        raise missing("file", f"an absolute path expected, as in file:///shared/rendezvous; got {url!r}")
    store = stores.FileStore(parsed.path, world_size)
    store.set_timeout(timeout)
    yield store, rank, world_size


def by_mpi(url: str, rank: int, world_size: int, timeout: timedelta = default_pg_timeout) -> Iterator[Found]:
    """Open a store on rank 0 and send its addresses and a random secret over MPI, without configuration."""
    from hpcdist.core import registry
    from hpcdist.core.backend import Bootstrap

    carrier = registry.connect("mpi", Bootstrap(rank, world_size, timeout))  # rank and size are MPI's
    try:
        store = serve_store(carrier, timeout)
    finally:
        carrier.close()
    yield store, carrier.rank, carrier.size


def by_slurm(url: str, rank: int, world_size: int, timeout: timedelta = default_pg_timeout) -> Iterator[Found]:
    """Use the variables of an srun step: rank 0's server listens on the step's first node.

    Several ports follow from job and step, because another program may use one of them. The secret (``slurm_secret``)
    distinguishes the job's server from another job's on the same node. With MUNGE any process may read the credential
    at those ports, and the store itself has another port.
    """
    step = slurm_step.step(os.environ)
    rank, world_size = required("slurm", step.rank, step.size)
    host = addresses.LOOPBACK if len(step.hosts) == 1 else step.hosts[0]
    key = slurm_secret.key_of(step.hosts)
    first = zlib.crc32(step.identity.encode())
    ports = [PORTS[(first + 1009 * i) % len(PORTS)] for i in range(CANDIDATES)]
    if key is None:
        store = by_munge(rank, host, ports, step.identity, timeout)
    else:
        secret = slurm_secret.secret(step.identity, key)
        places = [(host, port) for port in ports]
        store = join_any(places, timeout, secret) if rank else serve_any(host, ports, timeout, secret)
    yield store, rank, world_size


def by_munge(rank: int, host: str, ports: list[int], identity: str, timeout: timedelta) -> Store:
    """Open or join a store by a MUNGE credential with its port and secret, which rank 0 serves at one of the ports."""
    if rank == 0:
        secret = secrets.token_bytes(32)
        store = stores.TCPStore(host, 0, None, True, timeout, secret=secret)
        notice = serve_any(host, ports, timeout, None)
        notice.set(CREDENTIAL, slurm_secret.seal(identity, store.port, secret))
        NOTICES.append(notice)
        return store

    def by_notice(host: str, port: int) -> Store | None:
        notice = stores.TCPStore(host, port, timeout=ONE_TRY)
        found = slurm_secret.unseal(identity, notice.get(CREDENTIAL).decode(errors="replace"))
        return None if found is None else join_any([(host, found[0])], timeout, found[1])

    return first_of([(host, port) for port in ports], timeout, by_notice)


def serve_any(host: str, ports: list[int], timeout: timedelta, secret: bytes | None) -> Store:
    """Open a server on the first free port."""
    for port in ports:
        try:
            return stores.TCPStore(host, port, None, True, timeout, secret=secret)
        except DistNetworkError as error:
            failure = error
    raise DistNetworkError(f"no free port for the job's store on {host} among {ports}: {failure}")


def join_any(places: Sequence[tuple[str, int]], timeout: timedelta, secret: bytes) -> Store:
    """Connect to the job's own server at the first of its possible addresses and ports that accepts the secret."""

    def join(host: str, port: int) -> Store:
        store = stores.TCPStore(host, port, timeout=ONE_TRY, secret=secret)
        store.set_timeout(timeout)
        return store

    return first_of(places, timeout, join)


def first_of(
    places: Sequence[tuple[str, int]], timeout: timedelta, connect: Callable[[str, int], Store | None]
) -> Store:
    """Return the first store that ``connect`` opens, among the addresses with a listener."""
    deadline = time.monotonic() + timeout.total_seconds()
    failure: Exception | None = None
    while time.monotonic() < deadline:
        for host, port in places:
            try:
                if is_open(host, port) and (store := connect(host, port)) is not None:
                    return store
            except (DistNetworkError, DistStoreError) as error:
                failure = error
        time.sleep(0.05)
    tried = ", ".join(f"{host}:{port}" for host, port in places)
    seconds = timeout.total_seconds()
    text = f"no store of this job after {seconds:.0f} s; tried {tried} (last: {failure or 'no answer'})"
    raise DistNetworkError(add_hint(text, "store-unreachable"))


def is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


HANDLERS: dict[str, Handler] = {"env": by_environment, "tcp": by_tcp, "file": by_file, "mpi": by_mpi, "slurm": by_slurm}


# -- a store for groups that have a backend already --------------------------------------------------------


def serve_store(carrier: Any, timeout: timedelta) -> Store:
    """Open a server on rank 0, which sends its addresses and a random secret by a backend; every rank calls.

    If all ranks have the same ``addresses.network()``, the server listens on the loopback; else on all interfaces, and
    each rank uses the first of rank 0's addresses at which it reaches the server within the store's timeout. All ranks
    have connected when this returns: rank 0 may end its server at once. If one fails, all raise its error.
    """
    rank, networks = carrier.rank, carrier.objects.all_gather(addresses.network(), call=OPEN)
    made: list[Store] = []

    def serve() -> tuple[list[tuple[str, int]], bytes]:
        secret = secrets.token_bytes(32)
        hosts: tuple[str, ...] = (addresses.LOOPBACK,)
        listening = addresses.LOOPBACK
        if len(set(networks)) > 1:
            hosts = addresses.own_addresses()
            listening = addresses.ALL_INTERFACES[addresses.family()] if hosts else socket.gethostname()
        store = stores.TCPStore(listening, 0, None, True, timeout, secret=secret)
        made.append(store)
        return [(host, store.port) for host in hosts or (listening,)], secret

    opened: Any = attempt(carrier, OPEN, lambda: None if rank else serve())[0]
    places, secret = opened

    def join() -> None:
        is_near = networks[rank] == networks[0]
        made.append(join_any([(addresses.LOOPBACK, places[0][1])] if is_near else places, timeout, secret))

    attempt(carrier, OPEN, lambda: join() if rank else None)
    return made[0]


def opened_by_rank_0(carrier: Any, call: str, open_port: Callable[[], int]) -> tuple[str, int]:
    """Let rank 0 open a port, and return the host and port at which this rank reaches it; every rank calls this.

    If rank 0 fails, all ranks raise its error, with the user's call.
    """
    networks = carrier.objects.all_gather(addresses.network(), call=call)
    opened: Any = attempt(carrier, call, lambda: None if carrier.rank else (addresses.own_addresses(), open_port()))[0]
    hosts, port = opened
    if not hosts or networks[carrier.rank] == networks[0]:
        return addresses.LOOPBACK, port
    return next((host for host in hosts if is_open(host, port)), hosts[0]), port


def store_of(group: Any) -> Store:
    """Return the store of the default group, opened by the first call if the group is MPI's; every rank of it calls."""
    from hpcdist.core.world import WORLD

    if WORLD.store is None:
        with group.during(OPEN):
            WORLD.store = serve_store(group.any_backend(), group.timeout)
        SERVED[:] = [WORLD.store]
    return WORLD.store
