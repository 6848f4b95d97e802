"""Lists of tensors: their tensors go to MPI where they lie, and what cannot is copied on the rank that has it."""

from pathlib import Path

import pytest
import torch

import hpcdist as dist

pytest.importorskip("mpi4py")

MIB = 1 << 20


def full(count, value, dtype=torch.float32):
    return torch.full((count,), float(value)).to(dtype)


def are(tensors, expected):
    wide = torch.complex64  # torch.equal does not take float8
    return all(torch.equal(each.to(wide), other.to(wide)) for each, other in zip(tensors, expected, strict=True))


def test_shared_memory(rank, size):
    """Inputs that are outputs, and a tensor that is there twice, spoil nothing on any rank."""
    expected = [full(3, r + 1) for r in range(size)]
    outputs = [full(3, rank + 1) if r == rank else full(3, 0) for r in range(size)]
    dist.all_gather(outputs, outputs[rank])
    assert are(outputs, expected)
    same = full(3, 0)
    outputs = [same] * size if rank == 0 else [full(3, 0) for _ in range(size)]
    dist.all_gather(outputs, full(3, rank + 1))
    assert are([same], [expected[-1]]) if rank == 0 else are(outputs, expected)
    for root in range(size):
        outputs = [full(3, rank + 1) if r == rank else full(3, 0) for r in range(size)]
        dist.gather(outputs[rank], outputs if rank == root else None, root)
        assert rank != root or are(outputs, expected)
        inputs = [full(3, r + 1) for r in range(size)]
        output = inputs[(rank + 1) % size]
        dist.scatter(output, inputs if rank == root else None, root)
        assert are([output], [expected[rank]])
    tensors = [full(2, 10 * rank + r) for r in range(size)]
    dist.all_to_all(tensors, list(tensors))
    assert are(tensors, [full(2, 10 * r + rank) for r in range(size)])


@pytest.mark.parametrize("way", ["messages", "far apart"])
def test_copies_and_messages(monkeypatch, world, rank, size, way):
    """Shares of more bytes than MPI counts go as messages; tensors too far apart for it are copied."""
    if world.backends["cpu"].name != "mpi":
        pytest.skip("of MPI")
    from hpcdist.backends.mpi import vectors

    if way == "messages":
        monkeypatch.setattr(vectors, "COUNT_MAX", 8)
    else:
        monkeypatch.setattr(vectors, "REACH", -1)
    group = dist.new_group()  # which has prepared nothing
    expected = [full(3, r + 1) for r in range(size)]
    outputs = [full(3, 0) for _ in range(size)]
    dist.all_gather(outputs, full(3, rank + 1), group)
    assert are(outputs, expected)
    for root in range(size):
        outputs = [full(3, 0) for _ in range(size)]
        dist.gather(full(3, rank + 1), outputs if rank == root else None, root, group)
        assert rank != root or are(outputs, expected)
        output = full(3, 0)
        dist.scatter(output, expected if rank == root else None, root, group)
        assert are([output], [expected[rank]])
    dist.destroy_process_group(group)


def peak():
    """Return the most memory that this process has used since ``forget_peak``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process has used")
@pytest.mark.parametrize("name", ["all_gather", "gather", "scatter", "all_to_all", "reduce_scatter"])
def test_no_memory_grows_with_the_message(world, rank, size, name):
    """Contiguous tensors are copied nowhere; a reduce_scatter packs them where it has packed before."""
    if world.backends["cpu"].name != "mpi":
        pytest.skip("of MPI")
    count = 16 * MIB // 4
    one, inputs, outputs = full(count, 1), [full(count, r) for r in range(size)], [full(count, 0) for _ in range(size)]
    is_root = rank == 0
    calls = {
        "all_gather": lambda: dist.all_gather(outputs, one),
        "gather": lambda: dist.gather(one, outputs if is_root else None, 0),
        "scatter": lambda: dist.scatter(one, inputs if is_root else None, 0),
        "all_to_all": lambda: dist.all_to_all(outputs, inputs),
        "reduce_scatter": lambda: dist.reduce_scatter(one, inputs),
    }
    if name == "reduce_scatter":
        calls[name]()
    dist.barrier()
    forget_peak()
    before = peak()
    calls[name]()
    assert peak() - before < 8 * MIB
