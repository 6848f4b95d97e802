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
def torchs_server(processes):
    """Start torch's own server in another process: its list_keys would hold this one's interpreter lock."""
    owners = []

    def start(*, use_libuv):
        ours, theirs = processes.context.Pipe()
        owner = processes.context.Process(target=store_workers.own_server_of_torch, args=(theirs, use_libuv))
        owner.start()
        owners.append(owner)
        assert ours.poll(20)
        return ours.recv()

    yield start
    for owner in owners:
        owner.kill()
        owner.join(5)
