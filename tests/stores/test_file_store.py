"""FileStore: the contract, torch's format, killed writers and stale files."""

import errno
import fcntl
import os
import signal
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

import hpcdist_stores as stores
from tests.stores import store_workers
from tests.stores.deadlines import ends_at
from tests.stores.store_contract import StoreContract


def records(path):
    data, pos, found = path.read_bytes(), 0, []
    while pos < len(data):
        pair = []
        for _ in range(2):
            (size,) = struct.unpack_from("<I", data, pos)
            pair.append(data[pos + 4 : pos + 4 + size])
            pos += 4 + size
        found.append(tuple(pair))
    return found


class TestFileStore(StoreContract):
    has_queues = False
    bookkeeping_keys = 1  # refcount/

    @pytest.fixture
    def store(self, tmp_path):
        return stores.FileStore(tmp_path / "store")


def test_records_are_those_of_torch(tmp_path):
    written = []
    for name, kind in (("ours", stores.FileStore), ("torch", dist.FileStore)):
        path = tmp_path / name
        store = kind(str(path))
        store.set("k", b"\0v")
        store.add("n", 41)
        store.add("n", 1)
        store.compare_set("k", "x", "y")
        store.compare_set("k", b"\0v", "w")
        store.append("k", "!")
        store.delete_key("n")
        written.append(records(path))
    assert written[0] == written[1]


def test_both_kinds_share_a_file(tmp_path):
    path = str(tmp_path / "store")
    ours, torchs = stores.FileStore(path), dist.FileStore(path)
    ours.set("a", "1")
    assert torchs.get("a") == b"1"
    torchs.set("a", "2")
    assert ours.get("a") == b"2"
    assert [ours.add("n", 1), torchs.add("n", 1), ours.add("n", 1)] == [1, 2, 3]
    torchs.delete_key("a")
    assert not ours.check(["a"])
    ours.delete_key("n")
    assert not torchs.check(["n"])


def test_processes_of_both_kinds(tmp_path, processes):
    path = str(tmp_path / "store")
    kinds = [True, False] * 4
    results = processes(store_workers.file_counter, *[(path, kind, 50, len(kinds)) for kind in kinds])
    totals = sorted(total for result in results for total in result)
    assert totals == list(range(1, 401))
    assert not os.path.exists(path), "the last user removes the file"


def test_created_at_once_by_many(tmp_path, processes):
    for i in range(5):
        path = str(tmp_path / f"store{i}")
        results = processes(store_workers.file_meet, *[(path, rank, 4) for rank in range(4)])
        assert results == [[b"0", b"1", b"2", b"3"]] * 4


@pytest.mark.parametrize("cut", [1, 3, 4, 6, 9, 12])
def test_a_torn_record_is_cut_off(tmp_path, cut):
    path = tmp_path / "store"
    store = stores.FileStore(path)
    store.set("k", "whole")
    whole = path.read_bytes()
    record = struct.pack("<I", 5) + b"/torn" + struct.pack("<I", 4) + b"abcd"
    path.write_bytes(whole + record[:cut])
    reader = stores.FileStore(path)
    assert reader.get("k") == b"whole"
    assert not reader.check(["torn"])
    assert dist.FileStore(str(path)).get("k") == b"whole"  # torch's spins for ever at a torn record
    reader.set("torn", "now whole")
    assert store.get("torn") == b"now whole"


def test_a_waiting_reader_repairs_for_torchs(tmp_path):
    path = tmp_path / "store"
    store = stores.FileStore(path)
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(b"\x05\0\0\0/to")
    with pytest.raises(dist.DistStoreError):
        store.wait(["k"], timedelta(seconds=0.1))
    assert path.stat().st_size == size


def test_writers_killed_at_random_lose_nothing_of_others(tmp_path, processes):
    path = str(tmp_path / "store")
    store = stores.FileStore(path)
    for i in range(8):
        victim = processes.context.Process(target=store_workers.file_writer, args=(path,))
        victim.start()
        store.wait(["going"], timedelta(seconds=20))
        time.sleep(0.003 * i)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)
        store.set(f"mine{i}", "x" * 1000)
        store.delete_key("going")
    assert store.multi_get([f"mine{i}" for i in range(8)]) == [b"x" * 1000] * 8
    assert dist.FileStore(path).get("mine7") == b"x" * 1000


def _run_and_die(processes, path, world_size, is_ours=True):
    victim = processes.context.Process(target=store_workers.file_die, args=(path, world_size, is_ours))
    victim.start()
    victim.join(20)
    assert victim.exitcode == -signal.SIGKILL


def test_a_stale_file_whose_users_died_is_started_again(tmp_path, processes):
    path = str(tmp_path / "store")
    _run_and_die(processes, path, 2)
    _run_and_die(processes, path, 2)
    store = stores.FileStore(path, 2)
    assert store.list_keys() == []
    second = stores.FileStore(path, 2)
    second.set("k", "new run")
    assert store.get("k") == b"new run"


def test_a_stale_file_of_unknown_users_is_an_error(tmp_path, processes):
    path = str(tmp_path / "store")
    _run_and_die(processes, path, 1, is_ours=False)
    with pytest.raises(dist.DistStoreError, match=r"earlier run.*Remove the file"):
        stores.FileStore(path, 1)


def test_a_first_user_that_died_is_not_a_full_world(tmp_path, processes):
    path = str(tmp_path / "store")
    _run_and_die(processes, path, 2)
    assert stores.FileStore(path, 2).get("k") == b"old run"


def test_some_other_file_is_left_alone(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("ten years of work")
    with pytest.raises(dist.DistStoreError, match=r"not a FileStore file"):
        stores.FileStore(path, 1)
    assert path.read_text() == "ten years of work"


def test_a_held_lock_is_not_waited_for_beyond_the_deadline(tmp_path):
    path = tmp_path / "store"
    store = stores.FileStore(path)
    store.set_timeout(timedelta(seconds=1.0))
    with open(path) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        for call in (lambda: store.get("k"), lambda: store.set("k", "1")):
            ends_at(1.0, call, dist.DistStoreError, r"lock")


def test_a_removed_file_is_an_error_at_once(tmp_path):
    path = tmp_path / "store"
    store = stores.FileStore(path)
    path.unlink()
    with pytest.raises(dist.DistStoreError, match=r"gone"):
        store.get("k")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(dist.DistStoreError, match=r"cannot write to .*/absent/store: there is no such folder"):
        stores.FileStore(tmp_path / "absent" / "store")


@pytest.mark.parametrize("failing", ["open", "flock"])
def test_a_file_that_cannot_be_made_or_locked_is_named(tmp_path, monkeypatch, failing):
    def fail(*_):
        raise OSError(errno.ENOSPC if failing == "open" else errno.ENOLCK, "no more of it")

    monkeypatch.setattr(os if failing == "open" else fcntl, failing, fail)
    word = "open" if failing == "open" else "lock"
    with pytest.raises(dist.DistStoreError, match=rf"cannot {word} .*/store: no more of it"):
        stores.FileStore(tmp_path / "store")


def test_a_full_disk_counts_no_user_by_half(tmp_path, monkeypatch):
    """One that cannot write is none; the last one to leave removes the file, which takes no room."""
    path, write = tmp_path / "store", os.write
    first = stores.FileStore(path, 1)
    known, room = path.read_bytes(), []

    def fill(fd, data):
        if room and len(data) > room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", fill)
    room.append(20)  # bytes: for a counter, but not for a note
    with pytest.raises(dist.DistStoreError, match=r"cannot write to .*/store: No space left on device"):
        stores.FileStore(path, 2)
    assert path.read_bytes() == known
    del first
    assert not path.exists()


def test_the_last_user_removes_the_file(tmp_path):
    path = tmp_path / "store"
    first, second = stores.FileStore(path, 2), stores.FileStore(path, 2)
    twin = first.clone()
    del first
    assert path.exists()
    del second
    assert path.exists(), "a clone is still there"
    del twin
    assert not path.exists()


def test_a_cached_stat_does_not_hide_a_key(tmp_path, monkeypatch):
    """NFS answers stat(2) from memory for a while, and asks its server at each open."""
    path = str(tmp_path / "store")
    reader, writer = stores.FileStore(path, -1), stores.FileStore(path, -1)
    reader.set_timeout(timedelta(seconds=5))
    cached, real = os.stat(path), os.stat
    seen = threading.Event()

    def stat(name, *args, **kwargs):
        seen.set()
        return cached if name == path else real(name, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        late = threading.Timer(0.3, writer.set, ("late", "value"))
        late.start()
        assert reader.get("late") == b"value"
        late.join()
    assert seen.is_set()
