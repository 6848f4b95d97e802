"""Messages to neighbours and ghost cells: beside one process that has the whole array."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional

import hpcdist as dist
from hpcdist.core.errors import MismatchError
from tests.mpi.test_varied import Everyones, laid_out

MESHES = {1: [(1,), (1, 1)], 2: [(2,), (2, 1), (1, 2)], 3: [(3,), (1, 3)], 4: [(4,), (2, 2), (1, 4), (2, 1, 2)]}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64]


def cuts(cells, parts):
    """Where each rank's cells begin in a dimension, unevenly, and the end."""
    return [cells * at // parts for at in range(parts)] + [cells]


def part_of(whole, halo, width=0, coordinates=None):
    """A rank's part of an array, with so many layers around it; ``whole`` has them already."""
    for dim, place in enumerate(halo.coordinates if coordinates is None else coordinates):
        at = dim - len(halo.dims)
        layers = width * halo.width[dim]
        edges = cuts(whole.size(at) - 2 * layers, halo.dims[dim])
        whole = whole.narrow(at, edges[place], edges[place + 1] - edges[place] + 2 * layers)
    return whole


def surrounded(whole, halo, value):
    """The whole array with its ghost cells: the other end's where periodic, else a value."""
    for dim, (width, periodic) in enumerate(zip(halo.width, halo.periodic, strict=True)):
        at = dim - len(halo.dims)
        ends = [whole.narrow(at, whole.size(at) - width, width), whole.narrow(at, 0, width)]
        if not periodic:
            ends = [torch.full_like(each, value) for each in ends]
        whole = torch.cat([ends[0], whole, ends[1]], dim=at)
    return whole


def numbered(shape, dtype=torch.float64):
    return (torch.arange(torch.Size(shape).numel()) % 97).reshape(shape).to(dtype)


def cases(size):
    for dims in MESHES[size]:
        for width, periodic in itertools.product((1, 2), (False, True)):
            yield dims, width, periodic
        yield dims, tuple(range(len(dims))), [dim % 2 == 0 for dim in range(len(dims))]


def test_ghost_cells(rank, size):
    for dims, width, periodic in cases(size):
        halo = dist.HaloExchange(dims, width, periodic)
        whole = numbered((2, *(2 * each + 5 for each in dims)))
        for index, dtype in enumerate(DTYPES):
            around = surrounded(whole.to(dtype), halo, 1)
            field = torch.ones_like(part_of(around, halo, 1))
            inner = tuple(slice(each, size - each) for each, size in zip(halo.width, field.shape[1:], strict=True))
            field[(slice(None), *inner)] = part_of(whole.to(dtype), halo)
            field = laid_out(field, rank + index)
            assert halo(field) is field
            assert torch.equal(field, part_of(around, halo, 1)), (dims, width, periodic, dtype)
            padded = halo.pad(laid_out(part_of(whole.to(dtype), halo), rank + index))
            assert padded.is_contiguous()
            assert torch.equal(padded, part_of(surrounded(whole.to(dtype), halo, 0), halo, 1))


def test_numpy(rank, size):
    halo = dist.HaloExchange([size], periodic=True)
    field = np.array([-1.0, rank, rank + 0.5, -1.0])
    halo(field)
    assert field.tolist() == [(rank - 1) % size + 0.5, rank, rank + 0.5, (rank + 1) % size]
    padded = halo.pad(field[1:3])
    assert isinstance(padded, np.ndarray)
    assert padded.tolist() == field.tolist()


def test_a_mesh_and_its_neighbours(rank, size):
    halo = dist.HaloExchange([size, 1], periodic=[True, False])
    assert halo.coordinates == (rank, 0)
    assert halo.neighbours(0) == ((rank - 1) % size, (rank + 1) % size)
    assert halo.neighbours(1) == halo.neighbours(-1) == (None, None)
    with pytest.raises(ValueError, match="has no dimension 2"):
        halo.neighbours(2)
    with pytest.raises(TypeError, match="dim is None of type NoneType; expected an int"):
        halo.neighbours(None)
    if dist.get_backend() != "gloo":
        mesh = dist.init_device_mesh("cpu", (1, size))
        other = dist.HaloExchange(mesh, periodic=True)
        assert other.coordinates == (0, rank)
        assert torch.equal(
            other.pad(torch.full((1, 1), float(rank)))[1],
            torch.tensor([(rank - 1.0) % size, rank, (rank + 1.0) % size]),
        )
        assert mesh.mesh.tolist() == [list(range(size))]


def test_in_a_group(rank, size):
    """Ranks of the group are not those of the world."""
    group = dist.new_group(list(range(1, size))) if size > 1 else dist.group.WORLD
    if size == 1 or rank:
        members = dist.get_process_group_ranks(group)
        halo = dist.HaloExchange([len(members)], periodic=True, group=group)
        at = members.index(rank)
        expected = [members[at - 1], rank, members[(at + 1) % len(members)]]
        assert halo.pad(torch.tensor([rank])).tolist() == expected


def test_convolution(rank, size):
    """Two layers over parts of an image equal one process, gradients of input and weights included."""
    for dims in MESHES[size]:
        if len(dims) != 2:
            continue
        halo = dist.HaloExchange(dims)
        torch.manual_seed(0)
        image = torch.rand(2, 1, 9, 11, dtype=torch.float64)
        weights = [torch.rand(3, 1, 3, 3, dtype=torch.float64), torch.rand(2, 3, 3, 3, dtype=torch.float64)]
        alone = [each.clone().requires_grad_() for each in (image, *weights)]
        expected = functional.conv2d(functional.conv2d(alone[0], alone[1], padding=1).relu(), alone[2], padding=1)
        expected.square().sum().backward()
        own = [each.clone().requires_grad_() for each in (part_of(image, halo), *weights)]
        found = functional.conv2d(halo.pad(functional.conv2d(halo.pad(own[0]), own[1]).relu()), own[2])
        found.square().sum().backward()
        assert torch.allclose(found, part_of(expected.detach(), halo))
        assert torch.allclose(own[0].grad, part_of(alone[0].grad, halo))
        for mine, one in zip(own[1:], alone[1:], strict=True):
            dist.all_reduce(mine.grad)
            assert torch.allclose(mine.grad, one.grad)


def test_gradcheck(rank, size):
    dims = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}[size]
    halo = dist.HaloExchange(dims, 1, [True, False])
    whole = torch.rand([each + (index == 0) for index, each in enumerate(dims)], dtype=torch.float64)
    dist.broadcast(whole, 0)

    def function(given):
        padded = halo.pad(part_of(Everyones.apply(given)[0], halo).sin())
        flat, _ = dist.all_gather_varied(padded.square().view(-1))
        weighted = flat * torch.arange(1.0, 1.0 + len(flat), dtype=torch.float64)
        return torch.stack([each.sum() for each in weighted.split(5)])

    assert gradcheck(function, [whole.requires_grad_()])


def test_exchange(rank, size):
    """Each rank sends rows to some ranks, itself too, in another layout on each, to async and sync ranks."""

    def count(a, b):
        return (a + 2 * b) % 4

    for is_async in (False, bool(rank % 2)):
        sends = {to: laid_out(numbered((count(rank, to), 2, 3)) + rank, rank) for to in range(size) if count(rank, to)}
        recvs = {
            source: laid_out(torch.zeros(count(source, rank), 2, 3, dtype=torch.float64), rank + 1)
            for source in reversed(range(size))
            if count(source, rank)
        }
        work = dist.exchange(sends, recvs, async_op=is_async)
        if is_async:
            work.wait()
            assert work.is_completed()
        else:
            assert work is None
        for source, tensor in recvs.items():
            assert torch.equal(tensor, numbered((count(source, rank), 2, 3)) + source)


def test_exchange_beside_other_messages(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    users, array = torch.zeros(1), np.zeros(1)
    works = [dist.irecv(users, before), dist.isend(torch.full((1,), 5.0), after)]
    dist.exchange({after: np.full(1, float(rank))}, {before: array})
    for work in works:
        work.wait()
    assert array[0] == before
    assert users[0] == 5
    dist.exchange({}, {})


def test_the_same_memory_again_and_again(rank, size):
    """Messages are described once; what is in the memory changes, and other memory comes between."""
    for dims in MESHES[size]:
        halo = dist.HaloExchange(dims, periodic=True)
        fields = [
            torch.zeros([4] * len(dims)),
            torch.zeros([4] * len(dims)).movedim(0, -1),
            torch.zeros([4] * len(dims)),
        ]
        for turn in range(12):
            field = fields[(turn // 2 if turn < 6 else turn) % 3]
            field.fill_(float(10 * turn + rank))
            halo(field)
            for dim in range(len(dims)):
                before, after = halo.neighbours(dim)
                middle = [1] * len(dims)
                for at, neighbour in ((0, before), (3, after)):
                    middle[dim] = at
                    assert field[tuple(middle)] == 10 * turn + neighbour, (dims, turn)


def test_small_and_large_arrays_are_padded_again_and_again(rank, size):
    """Each result has memory of its own, though small ones are filled in memory that is kept."""
    halo = dist.HaloExchange([size], periodic=True)
    before, after = (rank - 1) % size, (rank + 1) % size
    for cells, dtype in ((1, torch.float64), (3, torch.bfloat16), (3, torch.float64), (20_000, torch.float64)):
        made = []
        for turn in range(4):
            with torch.inference_mode(turn == 2):
                made.append(halo.pad(torch.full((2, cells), 3 * rank + turn, dtype=dtype)))
        for turn, padded in enumerate(made):
            expected = torch.full((2, cells + 2), 3 * rank + turn, dtype=dtype)
            expected[:, 0], expected[:, -1] = 3 * before + turn, 3 * after + turn
            assert torch.equal(padded, expected), (cells, dtype, turn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_arrays_that_were_made_in_inference_mode(dtype, rank, size):
    """They are filled outside of it too, also in a dtype that NumPy lacks."""
    halo = dist.HaloExchange([1, size], periodic=True)
    with torch.inference_mode():
        whole = torch.full((4, 3), 7 + rank, dtype=dtype)
    assert halo(whole) is whole
    expected = torch.tensor([[7 + (rank + step) % size for step in (-1, 0, 1)]] * 4, dtype=dtype)
    assert torch.equal(whole, expected)


def test_a_message_that_is_too_long_and_what_comes_after_it(rank, size, world):
    if size == 1 or dist.get_backend() != "mpi":
        pytest.skip("MPI tells it, between two ranks")
    if rank < 2:
        other = 1 - rank
        shorter, next_to_it = torch.zeros(2), torch.zeros(1)
        with pytest.raises(MismatchError, match="rank 0 sent") if rank else contextlib.nullcontext():
            dist.exchange({other: torch.ones(2 + 2 * other)}, {other: shorter})
        dist.exchange({other: torch.full((1,), float(rank))}, {other: next_to_it})
        assert next_to_it == other
    dist.barrier()


def test_the_tags_of_our_own_messages_are_refused_to_users(rank, size, world):
    tensor, kept = torch.zeros(1), 32767
    for call in (
        lambda: dist.send(tensor, rank, tag=kept),
        lambda: dist.recv(tensor, tag=kept),
        lambda: dist.isend(tensor, rank, tag=kept),
        lambda: dist.irecv(tensor, rank, tag=kept),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, rank, tag=kept)]),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, rank, tag=kept)]),
        lambda: world.send([tensor], rank, kept),
        lambda: world.recv([tensor], rank, kept),
        lambda: world.recv_anysource([tensor], kept),
    ):
        with pytest.raises(ValueError, match="tag 32767 is kept"):
            call()
    for kept in (32701, 32702, 32703, 32742):  # monitored_barrier, profile, the two-level calls, NCCL's start
        with pytest.raises(ValueError, match=f"tag {kept} is kept"):
            dist.isend(torch.zeros(1), rank, tag=kept)


def test_wrong_arguments(rank, size):
    for sends in ([torch.zeros(1)], {0: "text"}, {0: torch.zeros(2).to_sparse()}):
        with pytest.raises(TypeError):
            dist.exchange(sends, {})
    with pytest.raises(ValueError, match="is not part of group"):
        dist.exchange({}, {size: torch.zeros(1)})
    for wrong in (
        lambda: dist.HaloExchange(size),
        lambda: dist.HaloExchange(None),
        lambda: dist.HaloExchange([float(size)]),
        lambda: dist.HaloExchange([size], width=1.5),
        lambda: dist.HaloExchange([size], width="1"),
        lambda: dist.HaloExchange([size], width=None),
        lambda: dist.HaloExchange([size, 1], periodic="no"),
    ):
        with pytest.raises(TypeError, match="expected integers"):
            wrong()
    for wrong, text in (
        (lambda: dist.HaloExchange([size + 1]), "product"),
        (lambda: dist.HaloExchange([]), "product") if size > 1 else (lambda: dist.HaloExchange([0]), "product"),
        (lambda: dist.HaloExchange([size], width=[1, 2]), "one value or 1"),
        (lambda: dist.HaloExchange([size], width=-1), "0 or more"),
        (lambda: dist.HaloExchange([size])(torch.zeros(2)), "expected last dimensions of"),
        (lambda: dist.HaloExchange([size], width=3).pad(torch.zeros(2)), "expected last dimensions of"),
        (lambda: dist.HaloExchange([size, 1]).pad(torch.zeros(2)), "expected last dimensions of"),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()
