"""The same calls give the same results, and the same kinds of errors, as torch.distributed on gloo."""

import inspect
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as td
from torch.distributed import distributed_c10d as c10d

import hpcdist as dist

BOTH = (dist, td)


def all_reduce(d, op, dtype):
    tensor = torch.arange(6, dtype=dtype) * (dist.get_rank() + 1) + 1
    d.all_reduce(tensor, getattr(d.ReduceOp, op))
    return tensor


def queries(d):
    group = d.new_group([0])
    inside = d.get_rank() == 0
    answers = [
        d.get_rank(),
        d.get_world_size(),
        d.get_rank(group),
        d.get_world_size(group),
        d.is_initialized(),
        d.is_available(),
        d.get_process_group_ranks(None),
        d.get_global_rank(d.group.WORLD, 0),
        d.supports_complex(d.ReduceOp.MAX),
        d.supports_complex(d.ReduceOp.SUM),
        group == d.GroupMember.NON_GROUP_MEMBER,
    ]
    if inside:
        d.destroy_process_group(group)
    return answers


def shared_memory_of_elements(d):
    expanded, columns = torch.ones(1).expand(4), torch.arange(3.0).expand(2, 3)
    d.all_reduce(expanded)
    d.broadcast(columns, 0)
    return expanded, columns


def numbers_of_other_types(d):
    size = d.get_world_size()
    given, output = torch.arange(2.0 * size), torch.empty(2 * size)
    d.broadcast(given, torch.tensor(0))
    d.broadcast(given, np.int64(0))
    d.all_to_all_single(output, given, np.full(size, 2), np.full(size, 2))
    return given, output


CALLS = [queries, shared_memory_of_elements, numbers_of_other_types]


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_same_results(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = call(dist), call(td)
    assert equal(ours, theirs), (ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.float16])
@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_same_reductions(op, dtype):
    assert torch.equal(all_reduce(dist, op, dtype), all_reduce(td, op, dtype))


ERRORS = {
    "no tensor": lambda d: d.all_reduce("x"),
    "complex max": lambda d: d.all_reduce(torch.ones(1, dtype=torch.complex64), d.ReduceOp.MAX),
    "float or": lambda d: d.all_reduce(torch.ones(1), d.ReduceOp.BOR),
    "no source": lambda d: d.broadcast(torch.ones(1)),
    "source outside": lambda d: d.broadcast(torch.ones(1), 99),
    "negative source": lambda d: d.broadcast(torch.ones(1), group_src=-1),
    "a word for a source": lambda d: d.broadcast(torch.ones(1), "0"),
    "nothing to reduce": lambda d: d.all_reduce(None),
    "nothing to gather": lambda d: d.all_gather_into_tensor(torch.ones(2), None),
    "list too long": lambda d: d.all_gather([torch.ones(1)] * (d.get_world_size() + 1), torch.ones(1)),
    "list sizes": lambda d: d.all_gather([torch.ones(2)] * d.get_world_size(), torch.ones(1)),
    "gathered size": lambda d: d.all_gather_into_tensor(torch.ones(3), torch.ones(4)),
    "gathered dtype": lambda d: d.all_gather_into_tensor(torch.ones(d.get_world_size()).int(), torch.ones(1)),
    "no inputs": lambda d: d.reduce_scatter(torch.ones(1), []),
    "splits of fractions": lambda d: d.all_to_all_single(torch.ones(2), torch.ones(2), [1.0, 1.0], [1.0, 1.0]),
    "two sources": lambda d: d.broadcast(torch.ones(1), 0, group_src=0),
    "send to oneself": lambda d: d.send(torch.ones(1), d.get_rank()),
    "no list": lambda d: d.all_gather(torch.ones(1), torch.ones(1)),
    "mixed dtypes": lambda d: d.all_gather([torch.ones(1)] * d.get_world_size(), torch.ones(1, dtype=torch.int32)),
    "list of numbers": lambda d: d.reduce_scatter(torch.ones(1), [1, 2]),
    "duplicates": lambda d: d.new_group([0, 0]),
    "out of range": lambda d: d.new_group([99]),
    "timeout": lambda d: d.new_group([0], timeout=3),
    "init twice": lambda d: d.init_process_group("gloo"),
    "no subgroup size": lambda d: d.new_subgroups(0),
    "subgroup size": lambda d: d.new_subgroups(99),
    "no subgroups": lambda d: d.new_subgroups_by_enumeration([]),
    "backend string": lambda d: d.BackendConfig("cpu:gloo,cpu:mpi"),
    "backend type": lambda d: d.Backend(3),
    "device": lambda d: d.get_default_backend_for_device("meta"),
    "p2p op": lambda d: d.P2POp(d.all_reduce, torch.ones(1), 0),
    "p2p list": lambda d: d.batch_isend_irecv([1]),
    "scatter output": lambda d: d.scatter_object_list([], [1]),
    "gather list": lambda d: d.gather(torch.ones(1), [torch.ones(1)] * 2, 0) if d.get_rank() else _raise_value(),
    "split": lambda d: d.split_group(None, []),
    "uneven exchange": lambda d: d.all_to_all_single(torch.ones(5), torch.ones(5), [1], [1]),
}


def _raise_value():
    raise ValueError


# what an older torch does not check: it makes the group and waits for it, or asks for a GPU first
WORDS = {"duplicates": "must not contain duplicate entries", "split": "split_ranks cannot be None or empty"}
CHECKED = inspect.getsource(c10d)


@pytest.mark.parametrize("case", ERRORS)
def test_same_kind_of_error(case):
    if WORDS.get(case, "") not in CHECKED:
        pytest.skip("this torch does not check it")
    kinds = []
    for d in BOTH:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(Exception) as caught:  # noqa: PT011  which one it is, is the question
                ERRORS[case](d)
        kinds.append(caught.type)
    ours, theirs = kinds
    assert issubclass(ours, theirs), f"ours raises {ours.__name__}, torch {theirs.__name__}"
