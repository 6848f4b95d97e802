"""Every operator of c10d that this torch has, on a group of ours beside one of gloo: what graphs and C++ call."""

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed._functional_collectives  # registers operators
from torch._C._distributed_c10d import Work
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import hpcdist as dist

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
FUNCTIONAL, AUTOGRAD, C10D = torch.ops._c10d_functional, torch.ops._c10d_functional_autograd, torch.ops.c10d
NO_CALLS = {"_dtensor::mesh_get_process_group"}  # returns a mesh's group; there once something imports DTensor
NAMES = sorted({each for each in torch._C._dispatch_get_all_op_names() if each.split("::")[0] in NAMESPACES} - NO_CALLS)


class Setting:
    """What the operators are called with on a rank: tensors, its neighbours, and a group as text and as an object."""

    def __init__(self, group):
        self.rank, self.size = rank, size = group.rank(), group.size()
        self.group, self.name, self.boxed = group, group.group_name, group.boxed()
        self.right, self.left = (rank + 1) % size, (rank - 1) % size
        self.mine, self.other = torch.full((2, 3), rank + 1.0), torch.arange(6.0).view(2, 3) + 10 * rank
        self.many = torch.arange(2.0 * size).view(2 * size // 2, 2) + rank
        self.sum = torch.classes.c10d.ReduceOp()

    def outputs(self):
        return [torch.zeros(2, 3) for _ in range(self.size)]

    def shares(self):
        return [share.clone() for share in self.many]

    def done(self, result, *written):
        """Wait for the Work of an operator of ``c10d::``, and return what it has written."""
        Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
        return list(written)


def waited(tensors):
    many = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return [FUNCTIONAL.wait_tensor(each) for each in many]


def gathered(s, call):
    """What a rank receives from all others by a call that is given the list of its outputs."""
    out = s.outputs()
    return s.done(call(out), *out)


def message(s, receive):
    """A ring: the even ranks send first."""
    out = torch.zeros(2, 3)
    if s.size == 1:
        return [out]
    begun = [C10D.send([s.mine], s.boxed, s.right, 3), receive(out)]
    for work in begun:
        Work.unbox(work).wait()
    return [out]


def with_gradient(s, call):
    """A functional operator's value and the gradient that it gives its input."""
    given = s.many.clone().requires_grad_()
    out = FUNCTIONAL.wait_tensor(call(given))
    (out * out).sum().backward()
    return [out.detach(), given.grad]


def functional_messages(s):
    if s.size == 1:
        return []
    sent, received = (
        FUNCTIONAL.isend(s.mine, s.right, 4, s.name),
        FUNCTIONAL.irecv(torch.zeros(2, 3), s.left, 4, s.name),
    )
    return waited([sent, received])


def messages_together(s):
    if s.size == 1:
        return []
    tensors = [s.mine, torch.zeros(2, 3)]
    return waited(FUNCTIONAL.batch_p2p_ops(["isend", "irecv"], [s.right, s.left], [5, 5], tensors, s.name))


def into(s, shape, call):
    out = torch.zeros(shape)
    return s.done(call(out), out)


def root(s):
    return s.size - 1


# operator -> what a rank has after it
CASES = {
    "_c10d_functional::_wrap_tensor_autograd": lambda s: [FUNCTIONAL._wrap_tensor_autograd(s.mine) + 0],
    "_c10d_functional::all_gather_into_tensor": lambda s: waited(
        FUNCTIONAL.all_gather_into_tensor(s.mine, s.size, s.name)
    ),
    "_c10d_functional::all_gather_into_tensor_coalesced": lambda s: waited(
        FUNCTIONAL.all_gather_into_tensor_coalesced([s.mine, s.other], s.size, s.name)
    ),
    "_c10d_functional::all_gather_into_tensor_out": lambda s: waited(
        FUNCTIONAL.all_gather_into_tensor_out(s.mine, s.size, s.name, out=torch.zeros(2 * s.size, 3))
    ),
    "_c10d_functional::all_reduce": lambda s: waited(FUNCTIONAL.all_reduce(s.mine, "sum", s.name)),
    "_c10d_functional::all_reduce_": lambda s: waited(FUNCTIONAL.all_reduce_(s.mine, "max", s.name)),
    "_c10d_functional::all_reduce_coalesced": lambda s: waited(
        FUNCTIONAL.all_reduce_coalesced([s.mine, s.other], "sum", s.name)
    ),
    "_c10d_functional::all_reduce_coalesced_": lambda s: waited(
        FUNCTIONAL.all_reduce_coalesced_([s.mine, s.other], "min", s.name)
    ),
    "_c10d_functional::all_to_all_single": lambda s: waited(
        FUNCTIONAL.all_to_all_single(s.many, [1] * s.size, [1] * s.size, s.name)
    ),
    "_c10d_functional::batch_p2p_ops": messages_together,
    "_c10d_functional::broadcast": lambda s: waited(FUNCTIONAL.broadcast(s.mine, root(s), s.name)),
    "_c10d_functional::broadcast_": lambda s: waited(FUNCTIONAL.broadcast_(s.mine, root(s), s.name)),
    "_c10d_functional::irecv": functional_messages,
    "_c10d_functional::isend": functional_messages,
    "_c10d_functional::reduce_scatter_tensor": lambda s: waited(
        FUNCTIONAL.reduce_scatter_tensor(s.many, "sum", s.size, s.name)
    ),
    "_c10d_functional::reduce_scatter_tensor_coalesced": lambda s: waited(
        FUNCTIONAL.reduce_scatter_tensor_coalesced([s.many, 2 * s.many], "sum", s.size, s.name)
    ),
    "_c10d_functional::reduce_scatter_tensor_out": lambda s: waited(
        FUNCTIONAL.reduce_scatter_tensor_out(s.many, "sum", s.size, s.name, out=torch.zeros(1, 2))
    ),
    "_c10d_functional::wait_tensor": lambda s: waited(s.mine),
    "_c10d_functional::wait_tensors": lambda s: list(
        FUNCTIONAL.wait_tensors([FUNCTIONAL.all_reduce(each, "sum", s.name) for each in (s.mine, s.other)])
    ),
    "_c10d_functional_autograd::all_gather_into_tensor": lambda s: with_gradient(
        s, lambda given: AUTOGRAD.all_gather_into_tensor(given, s.size, s.name)
    ),
    "_c10d_functional_autograd::all_to_all_single": lambda s: with_gradient(
        s, lambda given: AUTOGRAD.all_to_all_single(given, [1] * s.size, [1] * s.size, s.name)
    ),
    "_c10d_functional_autograd::reduce_scatter_tensor": lambda s: with_gradient(
        s, lambda given: AUTOGRAD.reduce_scatter_tensor(given, "sum", s.size, s.name)
    ),
    "_dtensor::shard_dim_alltoall": lambda s: waited(
        torch.ops._dtensor.shard_dim_alltoall(torch.arange(4.0 * s.size).view(2, -1) + s.rank, 0, 1, s.name)
    ),
    "c10d::_allgather_base_": lambda s: into(
        s, (2 * s.size, 3), lambda out: C10D._allgather_base_(out, s.mine, s.boxed, True, 60_000)
    ),
    "c10d::_reduce_scatter_base_": lambda s: into(
        s, (1, 2), lambda out: C10D._reduce_scatter_base_(out, s.many, s.boxed, s.sum)
    ),
    "c10d::allgather_": lambda s: gathered(s, lambda out: C10D.allgather_([out], [s.mine], s.boxed)),
    "c10d::allgather_coalesced_": lambda s: gathered(
        s, lambda out: C10D.allgather_coalesced_([[each] for each in out], [s.mine], s.boxed)
    ),
    "c10d::allgather_into_tensor_coalesced_": lambda s: into(
        s, (2 * s.size, 3), lambda out: C10D.allgather_into_tensor_coalesced_([out], [s.mine], s.boxed)
    ),
    "c10d::allreduce_": lambda s: s.done(C10D.allreduce_([s.mine], s.boxed, s.sum, None), s.mine),
    "c10d::allreduce_coalesced_": lambda s: s.done(
        C10D.allreduce_coalesced_([s.mine, s.other], s.boxed, s.sum), s.mine, s.other
    ),
    "c10d::alltoall_": lambda s: gathered(s, lambda out: C10D.alltoall_(out, [s.mine] * s.size, s.boxed)),
    "c10d::alltoall_base_": lambda s: into(
        s, (s.size, 2), lambda out: C10D.alltoall_base_(out, s.many, s.boxed, [], [])
    ),
    "c10d::barrier": lambda s: s.done(C10D.barrier(s.mine, s.boxed, [])),
    "c10d::broadcast_": lambda s: s.done(C10D.broadcast_([s.mine], s.boxed, root(s), 0), s.mine),
    "c10d::check_for_nan": lambda s: [C10D.check_for_nan(s.mine)][1:],
    "c10d::gather_": lambda s: gathered(
        s, lambda out: C10D.gather_([out] if s.rank == root(s) else [], [s.mine], s.boxed, root(s))
    ),
    "c10d::gather_into_tensor_": lambda s: into(
        s, (2 * s.size, 3), lambda out: C10D.gather_into_tensor_(out, s.mine, s.boxed, root(s))
    ),
    "c10d::monitored_barrier_": lambda s: [C10D.monitored_barrier_(s.mine, s.boxed, [], 60_000, False)][1:],
    "c10d::recv_": lambda s: message(s, lambda out: C10D.recv_([out], s.boxed, s.left, 3)),
    "c10d::recv_any_source_": lambda s: message(s, lambda out: C10D.recv_any_source_([out], s.boxed, 3)),
    "c10d::reduce_": lambda s: s.done(
        C10D.reduce_([s.mine], s.boxed, s.sum, root(s), 0), *[s.mine][: s.rank == root(s)]
    ),
    "c10d::reduce_scatter_": lambda s: into(
        s, (2,), lambda out: C10D.reduce_scatter_([out], [s.shares()], s.boxed, s.sum)
    ),
    "c10d::reduce_scatter_tensor_coalesced_": lambda s: into(
        s, (1, 2), lambda out: C10D.reduce_scatter_tensor_coalesced_([out], [s.many], s.boxed, s.sum)
    ),
    "c10d::scatter_": lambda s: into(
        s, (2,), lambda out: C10D.scatter_([out], [s.shares()] if s.rank == root(s) else [], s.boxed, root(s))
    ),
    "c10d::send": lambda s: message(s, lambda out: C10D.recv_([out], s.boxed, s.left, 3)),
}


HAS_OPS = "op" in torch.classes.c10d.ReduceOp()._method_names()
# what gloo of some torches cannot do, and the same result by what it can
LIKE = {
    "c10d::alltoall_": CASES["c10d::allgather_"],
    "c10d::gather_into_tensor_": lambda s: [torch.cat(CASES["c10d::gather_"](s))],
}


@pytest.mark.parametrize("name", NAMES)
def test_operator_as_on_gloo(name, world, gloo):
    assert name in CASES, f"this torch has an operator that no test calls: {name}"
    try:
        expected = CASES[name](Setting(gloo))
    except RuntimeError as error:
        if "gloo does not support" not in str(error):
            raise
        expected = LIKE[name](Setting(gloo))
    if name.startswith("_c10d_functional_autograd") and not expected[1].any():
        pytest.skip("the gradient of this torch's own groups is zero")
    takes_op = name.startswith("c10d") and "reduce_op" in str(getattr(C10D, name[6:]).default._schema)
    if takes_op and not HAS_OPS:
        with pytest.raises(RuntimeError, match="does not say which op"):
            CASES[name](Setting(world))
        return
    for turn in range(2):
        result = CASES[name](Setting(world))
        assert len(result) == len(expected)
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text, turn=turn: f"{name}, call {turn}: {text}")


TAKES_GROUPS = "Any group_name" in str(
    getattr(FUNCTIONAL, "all_gather_into_tensor_out", FUNCTIONAL.all_reduce).default._schema
)


@pytest.mark.skipif(not TAKES_GROUPS, reason="this torch takes a group's name only")
def test_a_group_itself_in_place_of_its_name(world, rank, size):
    out = FUNCTIONAL.all_gather_into_tensor_out(torch.ones(1) + rank, size, world, out=torch.zeros(size))
    assert FUNCTIONAL.wait_tensor(out).tolist() == [1.0 + each for each in range(size)]


@pytest.mark.skipif(not HAS_OPS, reason="this torch does not say by which op an operator reduces")
def test_a_traced_graph(world, rank, size):
    """A graph of operators runs again, and its values are those of the program that was traced."""

    def step(tensor, out):
        torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MAX)
        torch_dist.all_gather_into_tensor(out, tensor + rank)
        return out + 1

    graph = make_fx(step)(torch.zeros(1), torch.zeros(size))
    for turn in range(3):
        assert graph(torch.ones(1) * (rank + turn), torch.zeros(size)).tolist() == [
            size + turn + r for r in range(size)
        ]


class Twice(TorchDispatchMode):
    """A mode that sees operators, and calls one of gloo's in between."""

    def __init__(self, gloo):
        super().__init__()
        self.gloo, self.seen = gloo, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen.append(func._opname)
            between = torch.ones(1)
            torch_dist.all_reduce(between, group=self.gloo)
            assert between.item() == self.gloo.size()
        return func(*args, **(kwargs or {}))


def test_modes_and_a_premultiplied_sum(world, gloo, rank, size):
    tensor = torch.ones(2)
    with Twice(gloo) as mode:
        dist.all_reduce(tensor, torch_dist._make_nccl_premul_sum(3.0))
    assert mode.seen == ["allreduce_"]
    assert tensor.tolist() == [3 * size] * 2
