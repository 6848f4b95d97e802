"""Subject ``latency``: time of small calls by every door, synchronous and asynchronous.

Beside each call stand our synchronous one, what MPI itself takes for the same, and for torch's doors what torch takes
by itself, on its "fake" group, which sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as functional

import hpcdist as dist
from hpcdist.backends.mpi.process import runtime
from hpcdist.cli.bench.timing import Bench
from hpcdist.torch_bridge import private_names

NBYTES = 64
SEVERAL = 10  # calls that are begun before the first one is waited for
PREPARED = 200  # calls after which a group has prepared for their repetition


def measure(bench: Bench) -> None:
    """Time each way to make a small call."""
    group = private_names.fake_group()
    for nbytes in bench.options.sizes or [NBYTES]:
        all_reduces(bench, nbytes)
        by_torch(bench, nbytes, group)
        messages(bench, nbytes)


def all_reduces(bench: Bench, nbytes: int) -> None:
    """Time all_reduce by our own function."""
    tensor, send = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4).numpy()
    tensors = [torch.zeros(nbytes // 4) for _ in range(SEVERAL)]
    received = [torch.zeros(nbytes // 4).numpy() for _ in range(SEVERAL)]
    comm, gloo, wait_all = bench.comm, bench.gloo, runtime.load().Request.Waitall

    def synchronous() -> None:
        dist.all_reduce(tensor)

    def asynchronous() -> None:
        wait(dist.all_reduce(tensor, async_op=True))

    def several() -> None:
        for work in [dist.all_reduce(each, async_op=True) for each in tensors]:
            wait(work)

    def several_synchronous() -> None:
        for each in tensors:
            dist.all_reduce(each)

    def raw() -> None:
        comm.Allreduce(send, received[0])

    def raw_asynchronous() -> None:
        comm.Iallreduce(send, received[0]).Wait()

    def raw_several() -> None:
        wait_all([comm.Iallreduce(send, each) for each in received])

    compare(bench, "all_reduce", nbytes, {"hpcdist": synchronous, "mpi4py": raw})
    compare(
        bench,
        "all_reduce, async_op and wait",
        nbytes,
        {
            "hpcdist": asynchronous,
            "synchronous": synchronous,
            "mpi4py": raw_asynchronous,
            "gloo": lambda: gloo.allreduce([tensor]).wait(),
        },
    )
    compare(
        bench,
        f"{SEVERAL} with async_op, then {SEVERAL} waits",
        nbytes,
        {"hpcdist": several, "synchronous": several_synchronous, "mpi4py": raw_several},
        SEVERAL,
    )


def by_torch(bench: Bench, nbytes: int, fake: Any) -> None:
    """Time all_reduce by torch's functions, on our group and on one that sends nothing."""
    tensor = torch.zeros(nbytes // 4)
    ours = torch.distributed.group.WORLD

    def synchronous() -> None:
        dist.all_reduce(tensor)

    doors: dict[str, Callable[[Any], Any]] = {
        "torch.distributed": lambda group: torch.distributed.all_reduce(tensor, group=group),
        "torch.distributed, async_op and wait": lambda group: wait(
            torch.distributed.all_reduce(tensor, group=group, async_op=True)
        ),
        "functional collectives": lambda group: functional.wait_tensor(functional.all_reduce(tensor, "sum", group)),
    }
    for name, call in doors.items():
        sides = {"hpcdist": lambda: call(ours), "synchronous": synchronous, "torch's part": lambda: call(fake)}  # noqa: B023
        compare(bench, f"all_reduce of {name}", nbytes, sides)


def messages(bench: Bench, nbytes: int) -> None:
    """Time a message to the next rank and one from the rank before, begun together."""
    outgoing, incoming = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    send, recv = outgoing.numpy(), incoming.numpy()
    after, before = (bench.rank + 1) % bench.size, (bench.rank - 1) % bench.size
    comm, wait_all = bench.comm, runtime.load().Request.Waitall

    def ours() -> None:
        works = dist.irecv(incoming, before), dist.isend(outgoing, after)
        for work in works:
            wait(work)

    def batch() -> None:
        ops = [dist.P2POp(dist.irecv, incoming, before), dist.P2POp(dist.isend, outgoing, after)]
        for work in dist.batch_isend_irecv(ops):
            wait(work)

    def raw() -> None:
        requests = comm.Irecv(recv, before), comm.Isend(send, after)
        for request in requests:
            request.Wait()

    def raw_batch() -> None:
        wait_all([comm.Irecv(recv, before), comm.Isend(send, after)])

    compare(bench, "irecv and isend, and waits", nbytes, {"hpcdist": ours, "mpi4py": raw})
    compare(bench, "batch_isend_irecv of 2, and waits", nbytes, {"hpcdist": batch, "mpi4py": raw_batch})


def wait(work: Any) -> None:
    """Wait for a Work."""
    work.wait()


def compare(
    bench: Bench, what: str, nbytes: int, sides: dict[str, Callable[[], Any]], operations: int = 1
) -> dict[str, float]:
    """Time calls in interleaved rounds, once they are prepared for their repetition."""
    for call in sides.values():
        for _ in range(PREPARED // operations):
            call()
    return bench.compare(what, "float32", nbytes, sides, operations)
