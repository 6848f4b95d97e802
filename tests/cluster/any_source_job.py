"""Rank 0 receives from any rank what has arrived before it asks, in order; then objects; then what comes later."""

import time

import torch

import hpcdist as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
EACH = 4  # more than there are senders, so that one is left for the receive that names rank 1
if rank:
    for number in range(EACH):
        dist.send(torch.tensor([rank, number]), 0)
    dist.barrier()
    dist.send_object_list([{"from": rank}], 0)
else:
    time.sleep(0.5)  # all messages are there
    seen = []
    buffers = [torch.zeros(2, dtype=torch.long) for _ in range(size - 1)]
    works = [dist.irecv(buffer) for buffer in buffers]
    # made while the others wait: it must not take the first message of rank 1
    named = torch.zeros(2, dtype=torch.long)
    last = dist.irecv(named, 1)
    for buffer, work in zip(buffers, works, strict=True):
        work.wait()
        assert work._source_rank() == buffer[0], (work._source_rank(), buffer)
        seen.append(buffer.tolist())
    last.wait()
    seen.append(named.tolist())
    for _ in range(EACH * (size - 1) - size):
        buffer = torch.zeros(2, dtype=torch.long)
        assert dist.recv(buffer) == buffer[0]
        seen.append(buffer.tolist())
    for sender in range(1, size):
        assert [number for each, number in seen if each == sender] == list(range(EACH)), seen
    dist.barrier()
    given: list = [None]
    senders = {dist.recv_object_list(given) for _ in range(1, size)}
    assert senders == set(range(1, size))
# from here on receives are made before their messages come
large = torch.full((1 << 21,), float(rank))
if rank:
    dist.barrier()
    for number in range(2):
        dist.send(torch.tensor([rank, number]), 0, tag=rank)
    if rank == size - 1:
        dist.send(large, 0)  # blocks until rank 0, which is in the barrier, receives it
    dist.barrier()
else:
    unnamed = dist.irecv(large)
    pairs = [torch.zeros(2, dtype=torch.long) for _ in range(2 * size)]
    works = [dist.irecv(pairs[2 * each + k], (None, each)[k], tag=each) for each in range(1, size) for k in range(2)]
    dist.barrier()
    dist.barrier()
    for work in works[::-1]:
        work.wait()
    assert [pair.tolist() for pair in pairs[2:]] == [[each, k] for each in range(1, size) for k in range(2)], pairs
    unnamed.wait()
    assert large.min() == size - 1
    print("all received")
dist.barrier()
dist.destroy_process_group()
