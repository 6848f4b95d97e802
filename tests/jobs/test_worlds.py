"""Worlds that begin and end again and again, found through a store: in each cycle all must meet again."""

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import pytest

import hpcdist_stores as stores
from hpcdist.launch import rendezvous
from tests.forked import mpirun, python
from tests.ports import free_port
from tests.programs import BIN, HAS_ULFM, output, run, start

pytestmark = pytest.mark.timeout(300)

CYCLES = """
import os, sys, threading, time
from datetime import timedelta
import torch, torch.distributed
import hpcdist as dist

class Plain(torch.distributed.Store):  # a store of the program's own, which deletes nothing
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def set(self, key, value): self.inner.set(key, value)
    def get(self, key): return self.inner.get(key)
    def add(self, key, amount): return self.inner.add(key, amount)
    def check(self, keys): return self.inner.check(keys)
    def wait(self, keys, timeout=timedelta(seconds=30)): self.inner.wait(keys, timeout)

def opened():
    return len(os.listdir("/proc/self/fd")) + threading.active_count()

def cycle(front, keeps, **given):
    kept, counts = [], []
    for _ in range(8):
        front.init_process_group(**given)
        tensor = torch.full((3,), rank + 1.0)
        works = [front.all_reduce(tensor, async_op=True)]
        works[0].wait()
        group = front.new_group(list(range(size)))
        front.all_reduce(tensor, group=group)
        assert tensor[0] == size * size * (size + 1) / 2, tensor
        if keeps:
            kept[-1:] = [torch.distributed.distributed_c10d._get_default_store()]
            kept[:0] = [group, *works]
        del group, works
        front.destroy_process_group()
        counts.append(opened())
    deadline = time.monotonic() + 10
    while opened() > counts[1] and time.monotonic() < deadline:  # gloo's thread may close a socket a moment later
        time.sleep(0.01)
    assert opened() <= counts[1], (counts, opened())

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if sys.argv[1] == "agent":
    cycle(dist, True)
    cycle(torch.distributed, True, backend="hpcdist")
else:
    path, *ports = sys.argv[1:]
    by_hand = {"backend": "gloo", "rank": rank, "world_size": size, "timeout": timedelta(seconds=30)}
    os.environ["MASTER_PORT"] = ports[0]
    for keeps in (False, True):
        cycle(dist, keeps, backend="gloo", timeout=timedelta(seconds=30))
        cycle(dist, keeps, init_method=f"tcp://127.0.0.1:{ports[1]}", **by_hand)
    cycle(dist, False, init_method=f"file://{path}", **by_hand)
    for library, port in ((dist, ports[2]), (torch.distributed, ports[3])):  # one store for all worlds
        store = library.TCPStore("127.0.0.1", int(port), size, rank == 0, timedelta(seconds=30))
        cycle(dist, True, store=store, **by_hand)
    cycle(dist, True, store=Plain(store), **by_hand)
print("done", rank)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "cycles.py"
    path.write_text(CYCLES)
    return path


def assert_all_done(ranks):
    try:
        outputs = [output(each, timeout=90) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert all("done" in out for out, _ in outputs), outputs


def test_the_next_world_meets_where_the_last_one_did(program, tmp_path):
    command = [*python(), program, tmp_path / "rendezvous", *(free_port() for _ in range(4))]
    ranks = [start([*command], MASTER_ADDR="127.0.0.1", WORLD_SIZE="2", RANK=str(rank)) for rank in range(2)]
    assert_all_done(ranks)
    assert not (tmp_path / "rendezvous").exists()


def test_the_next_world_of_torchruns_workers(program):
    result = run([BIN / "torchrun", "--standalone", "--nproc-per-node", "2", program, "agent"], timeout=90)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == 2


RESTARTED = """
import os
from datetime import timedelta
import torch
import hpcdist as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
dist.all_reduce(tensor := torch.ones(1))
assert tensor == dist.get_world_size() == 2
print("done", dist.get_rank())
"""


def test_the_workers_of_two_agents_that_count_different_restarts():
    """Only the agent whose worker has failed counts; rank 0 was killed before all had met the last time."""
    server = stores.TCPStore("127.0.0.1", 0, None, True)
    server.set(rendezvous.INVITATION, "world/of a rank 0 that was killed")
    agent = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}
    agent |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    command = [*python(), "-c", RESTARTED]
    ranks = [start(command, RANK=rank, TORCHELASTIC_RESTART_COUNT=rank, **agent) for rank in "10"]
    assert_all_done(ranks)


@pytest.mark.parametrize("deletes", [True, False])
def test_a_rank_that_met_a_prefix_of_a_killed_rank_0_is_sent_on(deletes, monkeypatch):
    store = stores.HashStore()
    if not deletes:
        monkeypatch.setattr(store, "delete_key", Mock(side_effect=NotImplementedError))
    store.set(rendezvous.INVITATION, "left")
    limit = timedelta(seconds=20)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(rendezvous.meet, store, 1, 2, limit)
        stores.PrefixStore("left", store).wait(["rank 1"], limit)
        rendezvous.meet(store, 0, 2, limit).set("key", "value")
        assert other.result(30).get("key") == b"value"


LATE_STORE = """
import time
import torch.distributed as c10d
import hpcdist as dist
from hpcdist.launch import rendezvous

c10d.init_process_group("mpi")
store, rank = c10d.distributed_c10d._get_default_store(), c10d.get_rank()
if rank:
    found = rendezvous.join_any
    rendezvous.join_any = lambda *args: time.sleep(0.5) or found(*args)  # rank 0 is through first
store.set(f"key {rank}", "value")
if rank == 0:
    c10d.destroy_process_group()
else:
    time.sleep(0.5)
    assert store.get("key 0") == b"value"
print("done", rank)
"""


def test_rank_0_may_destroy_its_world_while_others_still_use_the_store():
    result = mpirun(2, ["-c", LATE_STORE])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == 2


DAEMONS = """
import sys, threading, time
import torch
import hpcdist as dist
from hpcdist.core.journal import CallRecord
from hpcdist.core.world import WORLD

dist.init_process_group("mpi")
other, began = dist.new_group(), threading.Semaphore(0)

def reduce():
    while True:
        dist.all_reduce(torch.ones(3))
        began.release()

def receive():
    dist.recv(torch.ones(3), 1 - dist.get_rank(), group=other)

threading.Thread(target=reduce, daemon=True).start()
threading.Thread(target=receive, daemon=True).start()  # on both ranks: whoever ends first was in this call
while not any(CallRecord(*each.call).name == "recv" for group in WORLD.watched() for each in group.journal.blocked()):
    time.sleep(0.01)
for _ in range(2):
    began.acquire()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_daemon_threads_are_in_calls_while_the_program_ends(status):
    result = mpirun(2, ["-c", DAEMONS, status], timeout=90)
    assert result.returncode == status, result.stderr
    assert "a thread is still in recv" in result.stderr or "a thread is still in all_reduce" in result.stderr
    for word in ("signal", "finaliz", "traceback", "terminate called", "corrupted"):
        assert word not in result.stderr.lower().replace("without mpi_finalize", ""), result.stderr


LEAVES = """
import signal, sys
from datetime import timedelta
import hpcdist as dist
from hpcdist.watch import job_end

job_end.END_SECONDS = 3.0
dist.init_process_group("mpi")
dist.barrier()
dist.group.WORLD.timeout = timedelta(seconds=2)
if dist.get_rank() == 1:
    sys.exit(int(sys.argv[1]))
try:
    if "members" in sys.argv:
        dist.new_group(use_local_synchronization=True)
    dist.all_gather_object([None] * dist.get_world_size(), 1)
except dist.DistBackendError:  # under ULFM
    signal.pause()
"""
ULFM = pytest.mark.skipif(not HAS_ULFM, reason="there is no ULFM")


@pytest.mark.parametrize(
    ("options", "call", "status"),
    [
        pytest.param([], "objects", 3, id="plain-3"),
        pytest.param([], "members", 0, id="members-0"),
        pytest.param(["--with-ft", "ulfm"], "objects", 3, marks=ULFM, id="ULFM-3"),
        pytest.param(["--with-ft", "ulfm"], "objects", 0, marks=ULFM, id="ULFM-0"),
    ],
)
def test_the_job_has_the_status_of_the_rank_that_left_while_others_wait(options, call, status):
    """Scripts that requeue a job read it; 0 would say that all is well."""
    result = mpirun(3, ["-c", LEAVES, status, call], timeout=90, options=options)
    assert "this rank has left the program" in result.stderr
    assert result.returncode == (status or 1), result.stderr


GLOOS_END = """
import atexit, os

def show():
    names = [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
    print(os.getpid() == parent, sum("gloo" in name for name in names), flush=True)

parent = os.getpid()
atexit.register(show)  # runs after the handlers of hpcdist
import torch
import hpcdist as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3), group=dist.new_group([0]))
show()
if os.fork():
    os.wait()
"""


def test_gloos_threads_end_before_python_does():
    result = run([sys.executable, "-c", GLOOS_END])
    assert result.returncode == 0, result.stderr
    before, child, after = result.stdout.splitlines()
    assert (child, after) == ("False 0", "True 0")
    assert int(before.split()[1]) > 2
