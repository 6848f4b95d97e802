"""HashStore: the contract."""

from datetime import timedelta

import pytest
import torch.distributed as dist

import hpcdist_stores as stores
from tests.stores.store_contract import StoreContract


class TestHashStore(StoreContract):
    @pytest.fixture
    def store(self):
        return stores.HashStore()

    def test_a_number_beyond_64_bits(self, store):
        store.set("big", "9" * 20)
        with pytest.raises(IndexError):
            store.add("big", 1)
        assert store.get("big") == b"9" * 20

    def test_clone_is_the_same_store(self, store):
        assert store.clone() is store
        assert isinstance(store, dist.Store)

    def test_a_queue_is_no_value(self, store):
        store.queue_push("queue", "first")
        store.set_timeout(timedelta(milliseconds=50))
        with pytest.raises(dist.DistStoreError, match="queue"):
            store.get("queue")
        store.set("queue", "value")
        assert (store.get("queue"), store.queue_pop("queue")) == (b"value", b"first")


def test_a_store_of_the_users_does_not_say_that_it_has_what_it_has_not():
    class Own(stores.Store):
        pass

    assert not Own().has_extended_api()
