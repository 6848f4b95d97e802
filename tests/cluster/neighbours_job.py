"""Job of ranks on several hosts: ghost cells, messages to some ranks and calls of varied sizes, with gradients."""

import torch

import hpcdist as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
dims = [2, 2] if size == 4 else [size, 1]

# every rank has a part of one image, with a margin of its neighbours' pixels, corners too; small faces and large ones
for side in (4, 300):
    rows, columns = dims[0] * side, dims[1] * side
    image = torch.arange(float(rows * columns)).view(rows, columns)
    halo = dist.HaloExchange(dims, periodic=True)
    top, left = (place * side for place in halo.coordinates)
    ring = [[(start + step) % whole for step in range(-1, side + 1)] for start, whole in ((top, rows), (left, columns))]
    expected = image[ring[0]][:, ring[1]]
    for _ in range(3):
        field = torch.zeros(side + 2, side + 2)
        field[1:-1, 1:-1] = image[top : top + side, left : left + side]
        assert torch.equal(halo(field), expected)
    part = image[top : top + side, left : left + side].clone().requires_grad_()
    halo.pad(part).sum().backward()
    assert part.grad.sum() == (side + 2) ** 2

# messages of different sizes, each way with some, while the group's collectives go on
others = [other for other in range(size) if other != rank]
for count in (3, 100_000):
    sends = {other: torch.full((count + rank, 2), float(rank))[:, 0] for other in others}
    recvs = {other: torch.empty(count + other) for other in others}
    work = dist.exchange(sends, recvs, async_op=True)
    dist.barrier()
    work.wait()
    assert all((tensor == other).all() for other, tensor in recvs.items())

# as many rows as each has, none on rank 1
for width in (2, 20_000):
    mine = torch.full((0 if rank == 1 else rank + 1, width), float(rank), requires_grad=rank == 0)
    everyone, sizes = dist.all_gather_varied(mine)
    assert sizes == [0 if other == 1 else other + 1 for other in range(size)], sizes
    assert all((rows == other).all() for other, rows in enumerate(everyone.split(sizes)))
    everyone.sum().backward()
    assert rank or (mine.grad == size).all()
    rest = dist.reduce_scatter_varied(torch.ones(sum(range(size)), width), rank)
    assert rest.shape == (rank, width)
    assert (rest == size).all()
    parts = dist.all_to_all_varied([torch.full((rank + other, width), float(rank)) for other in range(size)])
    assert [len(each) for each in parts] == [rank + other for other in range(size)]
    assert all((each == other).all() for other, each in enumerate(parts))

dist.barrier()
if rank == 0:
    print("all exchanged", flush=True)
dist.destroy_process_group()
