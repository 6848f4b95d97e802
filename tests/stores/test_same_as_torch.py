"""Random sequences of calls give the same results and errors on our stores as on torch's."""

import contextlib
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hpcdist_stores as stores
from hpcdist_stores.errors import LostServerError

keys = st.sampled_from(["a", "b", "c/d", "", "ü", b"\x01\x02"])
queue_keys = st.sampled_from(["q1", "q2"])
values = st.one_of(
    st.sampled_from(["", "0", "-7", " 12x", "99", "9223372036854775807", "text", b"\0\xff"]), st.binary(max_size=8)
)
amounts = st.one_of(st.integers(-5, 5), st.sampled_from([(1 << 63) - 1, -(1 << 63), True, 1.5, 1 << 63]))
key_lists = st.lists(keys, max_size=3)

calls = st.one_of(
    st.tuples(st.just("set"), keys, values),
    st.tuples(st.just("add"), keys, amounts),
    st.tuples(st.just("append"), keys, values),
    st.tuples(st.just("compare_set"), keys, values, values),
    st.tuples(st.just("check"), key_lists),
    st.tuples(st.just("delete_key"), keys),
    st.tuples(st.just("get"), keys),
    st.tuples(st.just("multi_get"), key_lists),
    st.tuples(st.just("multi_set"), key_lists, st.lists(values, max_size=3)),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("list_keys")),
    st.tuples(st.just("wait"), key_lists, st.just(timedelta(milliseconds=1))),
)
queue_calls = st.one_of(
    calls,
    st.tuples(st.just("queue_push"), queue_keys, values),
    st.tuples(st.just("queue_pop"), queue_keys, st.just(False)),
    st.tuples(st.just("queue_len"), queue_keys),
    st.tuples(st.just("check"), st.lists(queue_keys, max_size=2)),
)


def outcome(store, call):
    """Return what a call gives, or the class of its error."""
    name, *arguments = call
    if name in ("get", "multi_get"):  # of a missing key they wait, which the contract looks at
        wanted = [arguments[0]] if name == "get" else arguments[0]
        if not store.check(wanted):
            return "waits"
    if name == "wait":  # torch needs more than a millisecond even for keys that are there
        arguments[1] = timedelta(seconds=5) if store.check(arguments[0]) else timedelta(milliseconds=1)
    if name == "multi_set":
        names, contents = arguments
        arguments = [names[: len(contents)], contents[: len(names)]]
    try:
        result = getattr(store, name)(*arguments)
    except Exception as error:
        # where torch's FileStore raises a plain RuntimeError, ours raises its subclass
        if isinstance(error, RuntimeError) and store.__class__.__name__ == "FileStore":
            return RuntimeError
        # ours is a subclass for a server that has closed the connection
        return dist.DistNetworkError if type(error) is LostServerError else type(error)
    return sorted(result) if name == "list_keys" else result


@contextlib.contextmanager
def pair(kind):
    if kind == "HashStore":
        yield stores.HashStore(), dist.HashStore()
    elif kind == "FileStore":
        with tempfile.TemporaryDirectory() as folder:
            yield (stores.FileStore(Path(folder, "ours")), dist.FileStore(str(Path(folder, "torchs"))))
    elif kind == "our client on torch's server":
        servers = [dist.TCPStore("127.0.0.1", 0, None, True) for _ in range(2)]
        yield stores.TCPStore("127.0.0.1", servers[0].port), servers[1]
    elif kind == "torch's client on our server":
        server = stores.TCPStore("127.0.0.1", 0, None, True)
        yield dist.TCPStore("127.0.0.1", server.port, None, False), dist.TCPStore("127.0.0.1", 0, None, True)
    else:
        yield stores.TCPStore("127.0.0.1", 0, None, True), dist.TCPStore("127.0.0.1", 0, None, True)


def closes(call, results):
    """Return whether a server closed the connection: torch's client is of no use from then on."""
    return dist.DistNetworkError in results


@pytest.mark.parametrize(
    "kind", ["HashStore", "FileStore", "TCPStore", "our client on torch's server", "torch's client on our server"]
)
def test_same_results_and_errors(kind):
    examples = 25 if "client" in kind or kind == "TCPStore" else 60

    @settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.lists(calls if kind == "FileStore" else queue_calls, max_size=25))
    def run(sequence):
        with pair(kind) as (ours, torchs):
            assert ours.has_extended_api() == torchs.has_extended_api()
            for call in sequence:
                if kind == "FileStore" and call[0] == "list_keys":
                    continue  # torch's lists its user counter too, less its first letter
                if kind == "FileStore" and call[0] == "wait":
                    continue  # torch's takes a second or two for each
                results = outcome(ours, call), outcome(torchs, call)
                assert results[0] == results[1], call
                if closes(call, results):
                    break

    run()
