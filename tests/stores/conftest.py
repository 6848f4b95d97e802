"""Processes and servers that the store tests use (loopback only)."""

import multiprocessing

import pytest

from tests.stores import store_workers


@pytest.fixture(scope="session")
def processes():
    """Start functions of store_workers in processes that have torch and stores imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "hpcdist_stores", "tests.stores.store_workers"])

    def run(function, *argument_lists, timeout=60):
        with context.Pool(len(argument_lists)) as pool:
            return pool.starmap_async(function, argument_lists, chunksize=1).get(timeout)

    run.context = context
    return run


@pytest.fixture
def owner(processes):
    """Start a process that owns a server until the test's end, and return it and what it sends."""
    owners = []

    def start(target, *arguments):
        ours, theirs = processes.context.Pipe()
        owners.append(processes.context.Process(target=target, args=(theirs, *arguments)))
        owners[-1].start()
        assert ours.poll(60)
        return owners[-1], ours.recv()

    yield start
    for each in owners:
        each.kill()
        each.join(20)


@pytest.fixture
def torchs_server(owner):
    """Start torch's own server in another process: its list_keys would hold this one's interpreter lock."""
    return lambda *, use_libuv: owner(store_workers.own_server_of_torch, use_libuv)[1]
