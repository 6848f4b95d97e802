"""PrefixStore: the contract, over our stores and torch's."""

import pytest
import torch.distributed as dist

import hpcdist_stores as stores
from tests.stores.store_contract import StoreContract


class TestPrefixStore(StoreContract):
    @pytest.fixture
    def store(self):
        return stores.PrefixStore("outer", stores.PrefixStore("inner", stores.HashStore()))

    def test_prefixes_join_from_the_inside(self):
        below = stores.HashStore()
        stores.PrefixStore("a", stores.PrefixStore("b", below)).set("k", "1")
        stores.PrefixStore("", below).set("k", "2")
        assert sorted(below.list_keys()) == ["/k", "b/a/k"]

    def test_lists_whole_prefixes_only(self):
        below = stores.HashStore()
        stores.PrefixStore("p", below).set("k", "1")
        stores.PrefixStore("pq", below).set("x", "1")
        assert stores.PrefixStore("p", below).list_keys() == ["k"]

    def test_names_the_store_below(self):
        below = stores.HashStore()
        prefix = stores.PrefixStore("a", dist.PrefixStore("b", below))
        assert prefix.underlying_store.underlying_store is below
        assert prefix._underlying_non_prefix_store is below

    def test_needs_a_store(self):
        with pytest.raises(TypeError, match="a Store"):
            stores.PrefixStore("a", {})


class TestPrefixStoreOverTorch(StoreContract):
    @pytest.fixture
    def store(self):
        return stores.PrefixStore("p", dist.HashStore())

    # torch's own store is below: its errors name no keys, its add wakes nobody, timedelta.max is negative to it
    test_deadlines_are_kept_and_errors_tell = None
    test_the_stores_own_timeout = None
    test_the_longest_timeout = None
    test_a_timeout_that_cpp_sets = None
    test_every_write_wakes = None
    test_queues = None
