"""Contract of every store: one class, which each store's test file inherits with the way to make a store."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

import hpcdist_stores as stores
from tests.stores.deadlines import ends_at


class StoreContract:
    has_queues = True
    bookkeeping_keys = 0  # keys that num_keys counts before the first set
    not_a_number = ValueError

    @pytest.fixture
    def store(self, tmp_path):
        raise NotImplementedError

    @pytest.fixture
    def other(self, store):
        """Another handle to the same keys."""
        return store.clone()

    # -- names and types

    def test_is_a_store_of_torch(self, store):
        assert isinstance(store, dist.Store)
        assert isinstance(store, stores.Store)

    def test_has_every_public_name_of_torch(self, store):
        torchs = {name for name in dir(getattr(dist, type(store).__name__)) if not name.startswith("_")}
        assert torchs <= set(dir(store))

    def test_str_and_bytes_are_the_same(self, store):
        store.set("ключ", "значение")
        assert store.get("ключ".encode()) == "значение".encode()
        store.set(b"b\0in", b"\0\xff")
        assert store.get("b\0in") == b"\0\xff"

    @pytest.mark.parametrize("value", [b"", b"\0" * 3, bytes(range(256)), b"x" * 300_000], ids=len)
    def test_any_bytes_are_kept(self, store, value):
        store.set("key", value)
        assert store.get("key") == value
        assert store.multi_get(["key", "key"]) == [value, value]

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("set", ("k", 3)),
            ("set", (3, "k")),
            ("set", ("k", memoryview(b"x"))),
            ("add", ("k", 1.5)),
            ("add", ("k", 1 << 63)),
            ("check", ("abc",)),
            ("wait", ("abc",)),
            ("wait", (["abc"], 1)),
            ("set_timeout", (1,)),
        ],
    )
    def test_wrong_arguments_are_type_errors(self, store, name, arguments):
        with pytest.raises(TypeError):
            getattr(store, name)(*arguments)

    # -- values

    def test_set_replaces(self, store, other):
        store.set("k", "1")
        store.set("k", "2")
        assert store.get("k") == b"2"
        assert other.get("k") == b"2"

    def test_add_counts_from_nothing_and_wraps(self, store, other):
        assert store.add("n", 5) == 5
        assert other.add("n", -7) == -2
        assert store.get("n") == b"-2"
        assert store.add("top", (1 << 63) - 1) == (1 << 63) - 1
        assert store.add("top", 1) == -(1 << 63)
        store.set("text", " 12x")
        assert store.add("text", 1) == 13

    def test_add_to_text_is_an_error_and_keeps_it(self, store, other):
        store.set("k", "text")
        with pytest.raises(self.not_a_number):
            store.add("k", 1)
        assert other.get("k") == b"text"
        assert store.get("k") == b"text"

    def test_append(self, store):
        store.append("k", "a")
        store.append("k", b"b")
        assert store.get("k") == b"ab"

    def test_compare_set(self, store):
        assert store.compare_set("k", "old", "new") == b"old"
        assert not store.check(["k"])
        assert store.compare_set("k", "", "1") == b"1"
        assert store.compare_set("k", "x", "2") == b"1"
        assert store.compare_set("k", "1", "2") == b"2"
        assert store.get("k") == b"2"

    def test_check_delete_count_list(self, store):
        assert store.num_keys() == self.bookkeeping_keys
        store.multi_set(["a", "b", "c"], ["1", "2", "3"])
        assert store.check(["a", "b"])
        assert store.check([])
        assert not store.check(["a", "missing"])
        assert store.num_keys() == self.bookkeeping_keys + 3
        assert store.delete_key("a") is True
        assert not store.check(["a"])
        assert sorted(store.list_keys()) == ["b", "c"]
        store.set("d", "4")
        assert store.deleteKey("d")
        assert store.getNumKeys() == self.bookkeeping_keys + 2

    def test_list_keys_of_bytes_that_are_no_text(self, store):
        store.set(b"\xff", "1")
        with pytest.raises(UnicodeDecodeError):
            store.list_keys()

    def test_multi_set_needs_as_many_values(self, store):
        with pytest.raises(dist.DistStoreError, match=r"2 keys, 1 values"):
            store.multi_set(["a", "b"], ["1"])

    def test_many_keys(self, store):
        keys = [f"key{i}" for i in range(1000)]
        store.multi_set(keys, keys)
        assert store.multi_get(keys) == [key.encode() for key in keys]
        assert store.check(keys)
        assert store.multi_get([]) == []

    # -- waiting

    @pytest.mark.parametrize("act", ["set", "add", "append", "compare_set", "multi_set"])
    def test_every_write_wakes(self, store, other, act):
        arguments = {
            "set": ("k", "1"),
            "add": ("k", 1),
            "append": ("k", "1"),
            "compare_set": ("k", "", "1"),
            "multi_set": (["k"], ["1"]),
        }[act]
        store.set_timeout(timedelta(seconds=20))  # a waiter that is not woken ends in an error then
        timer = threading.Timer(0.1, lambda: getattr(other, act)(*arguments))
        start = time.monotonic()
        timer.start()
        assert store.get("k") == b"1"
        assert time.monotonic() - start >= 0.1
        timer.join()

    def test_wait_for_several(self, store, other):
        timer = threading.Timer(0.05, lambda: (other.set("a", "1"), time.sleep(0.05), other.set("b", "1")))
        timer.start()
        store.wait(["a", "b"], timedelta(seconds=30))
        assert store.check(["a", "b"])
        timer.join()

    @pytest.mark.parametrize("seconds", [0.0, 0.1, 1.0])
    def test_deadlines_are_kept_and_errors_tell(self, store, seconds):
        store.set("there", "1")

        def names_the_missing_alone(i):
            time.sleep(0.007 * i)  # not in step with what pauses this machine's processors, each 100 ms or so
            error = ends_at(
                seconds,
                lambda: store.wait(["there", "missing"], timedelta(seconds=seconds)),
                dist.DistStoreError,
                r"missing.* \d+\.\d+ s",
            )
            return "there" not in str(error).split("(")[0]

        # a server that is too busy to tell which are missing has them all named
        assert any(names_the_missing_alone(i) for i in range(30))

    def test_the_stores_own_timeout(self, store):
        assert store.timeout == timedelta(seconds=300)
        store.set_timeout(timedelta(seconds=0.2))
        assert store.timeout == timedelta(seconds=0.2)
        for call in (
            lambda: store.get("missing"),
            lambda: store.multi_get(["missing"]),
            lambda: store.wait(["missing"]),
            lambda: store.barrier("b", 1000),  # every call counts, one that timed out too
        ):
            ends_at(0.2, call, dist.DistStoreError, r"missing|key: b|b/last_member")
        store.set("k", "still works")
        assert store.get("k") == b"still works"

    def test_a_timeout_that_cpp_sets(self, store):
        prefix, clone = dist.PrefixStore("p", store), store.clone()  # a busy server takes more than 0.2 s for that
        prefix.set_timeout(timedelta(seconds=0.2))  # torch's C++ sets it in the C++ half
        assert store.timeout == timedelta(seconds=0.2)
        for call in (
            lambda: prefix.get("missing"),
            lambda: store.get("missing"),
            lambda: clone.wait(["missing"], store.timeout),
        ):
            ends_at(0.2, call, dist.DistStoreError, r"missing")
        prefix.set_timeout(timedelta(seconds=-1))
        timer = threading.Timer(0.1, lambda: store.set("late", "1"))
        timer.start()
        assert store.get("late") == b"1", "a negative timeout is for ever"
        timer.join()

    def test_the_longest_timeout(self, store):
        store.set_timeout(timedelta.max)
        for wait in (lambda: store.get("late"), lambda: store.wait(["late"], timedelta.max)):
            timer = threading.Timer(0.1, lambda: store.clone().set("late", "1"))
            timer.start()
            wait()
            timer.join()
            store.delete_key("late")

    def test_a_waiting_thread_does_not_block_the_others(self, store):
        waiting = threading.Thread(target=lambda: store.wait(["late"], timedelta(seconds=10)))
        waiting.start()
        time.sleep(0.05)
        start = time.monotonic()
        store.set("k", "1")
        assert store.get("k") == b"1"
        assert time.monotonic() - start < 8, "the waiter has the store for 10 s"
        store.set("late", "1")
        waiting.join(5)
        assert not waiting.is_alive()

    def test_barrier(self, store):
        with ThreadPoolExecutor() as pool:
            limit = timedelta(seconds=30)
            waiting = [pool.submit(store.clone().barrier, "b", 4, limit) for _ in range(3)]
            time.sleep(0.1)
            assert not any(each.done() for each in waiting)
            store.barrier("b", 4, limit)
            for each in waiting:
                each.result(30)

    # -- queues

    def test_queues(self, store, other):
        if not self.has_queues:
            for name, arguments in (("queue_push", ("q", "1")), ("queue_pop", ("q",)), ("queue_len", ("q",))):
                with pytest.raises(NotImplementedError):
                    getattr(store, name)(*arguments)
            return
        before = store.num_keys()
        for value in ("1", "2", ""):
            store.queue_push("q", value)
        assert store.queue_len("q") == 3
        assert store.check(["q"])
        assert store.num_keys() == before
        assert [other.queue_pop("q") for _ in range(3)] == [b"1", b"2", b""]
        with pytest.raises(dist.QueueEmptyError, match=r"queue is empty"):
            store.queue_pop("q", False)
        timer = threading.Timer(0.05, lambda: other.queue_push("q", "late"))
        timer.start()
        assert store.queue_pop("q", block=True) == b"late"
        timer.join()
        store.set_timeout(timedelta(seconds=0.1))
        with pytest.raises(dist.DistStoreError, match=r"q"):
            store.queue_pop("q")

    # -- threads

    def test_32_threads(self, store):
        def work(number):
            handle = store if number % 2 else store.clone()
            for i in range(10):
                handle.add("sum", 1)
                handle.append("bytes", "x")
                while True:  # a counter made of compare_set
                    old = handle.get("cas") if handle.check(["cas"]) else b""
                    new = b"%d" % (int(old.split()[0] if old else 0) + 1)
                    if handle.compare_set("cas", old, new + b" %d" % number) == new + b" %d" % number:
                        break
                handle.set(f"{number}/{i}", b"%d" % i)

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(work, range(32)))
        assert store.get("sum") == b"320"
        assert store.get("bytes") == b"x" * 320
        assert store.get("cas").split()[0] == b"320"
        assert all(store.get(f"{n}/{i}") == b"%d" % i for n in range(32) for i in range(10))

    # -- torch's C++ over it

    def test_torchs_prefix_store_over_it(self, store):
        prefix = dist.PrefixStore("p", store)
        prefix.set("k", "1")
        assert store.get("p/k") == b"1"
        assert prefix.get("k") == b"1"
        assert prefix.add("n", 3) == 3
        assert prefix.compare_set("k", "1", "2") == b"2"
        assert prefix.check(["k"])
        prefix.wait(["k"], timedelta(seconds=1))
        prefix.append("k", "3")
        assert prefix.multi_get(["k"]) == [b"23"]
        prefix.multi_set(["x"], ["y"])
        assert prefix.num_keys() == store.num_keys()
        assert prefix.delete_key("x")
        prefix.barrier("b", 1)

    def test_lives_while_cpp_holds_it(self, store, other):
        below = other
        prefix = dist.PrefixStore("p", stores.PrefixStore("q", below))
        twin = prefix.clone()
        del prefix
        twin.set("k", "1")
        assert store.get("q/p/k") == b"1"
