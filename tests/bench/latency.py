"""Subject ``latency``: time of small calls by every door, synchronous and asynchronous.

Beside each call stand our synchronous one, what MPI itself takes for the same, and for torch's doors what torch takes
by itself, on its "fake" group, which sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
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
    """Time each way to make a small call, once it is prepared for its repetition."""
    fake = private_names.fake_group()
    for nbytes in bench.options.sizes or [NBYTES]:
        for what, sides in rows(bench, nbytes // 4, fake).items():
            operations = SEVERAL if what.startswith(f"{SEVERAL} ") else 1
            for call in sides.values():
                for _ in range(PREPARED // operations):
                    call()
            bench.compare(what, "float32", nbytes, sides, operations)


def rows(bench: Bench, count: int, fake: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return each row's calls by their sides, of tensors of ``count`` elements."""
    comm, wait_all, ours = bench.comm, runtime.load().Request.Waitall, torch.distributed.group.WORLD
    one, other, *several = (torch.zeros(count) for _ in range(2 + SEVERAL))
    a, b, *arrays = (tensor.numpy() for tensor in (one, other, *several))
    after, before = (bench.rank + 1) % bench.size, (bench.rank - 1) % bench.size

    def synchronous() -> None:
        dist.all_reduce(one)

    def begun(tensor: torch.Tensor, lib: Any = dist, group: Any = None) -> Any:
        return lib.all_reduce(tensor, group=group, async_op=True)

    def requests() -> list[Any]:
        return [comm.Irecv(b, before), comm.Isend(a, after)]

    def raw_messages() -> None:
        for request in requests():
            request.Wait()

    def batch() -> Any:
        ops = [dist.P2POp(dist.irecv, other, before), dist.P2POp(dist.isend, one, after)]
        return dist.batch_isend_irecv(ops)

    doors: dict[str, Callable[[Any], Any]] = {
        "torch.distributed": lambda group: torch.distributed.all_reduce(one, group=group),
        "torch.distributed, async_op and wait": lambda group: begun(one, torch.distributed, group).wait(),
        "functional collectives": lambda group: functional.wait_tensor(functional.all_reduce(one, "sum", group)),
    }
    return {
        "all_reduce": {"hpcdist": synchronous, "mpi4py": lambda: comm.Allreduce(a, b)},
        "all_reduce, async_op and wait": {
            "hpcdist": lambda: begun(one).wait(),
            "synchronous": synchronous,
            "mpi4py": lambda: comm.Iallreduce(a, b).Wait(),
            "gloo": lambda: bench.gloo.allreduce([one]).wait(),
        },
        f"{SEVERAL} with async_op, then {SEVERAL} waits": {
            "hpcdist": lambda: wait([begun(each) for each in several]),
            "synchronous": lambda: [dist.all_reduce(each) for each in several],
            "mpi4py": lambda: wait_all([comm.Iallreduce(a, each) for each in arrays]),
        },
        **{
            f"all_reduce of {name}": {
                "hpcdist": partial(call, ours),
                "synchronous": synchronous,
                "torch's part": partial(call, fake),
            }
            for name, call in doors.items()
        },
        "irecv and isend, and waits": {
            "hpcdist": lambda: wait([dist.irecv(other, before), dist.isend(one, after)]),
            "mpi4py": raw_messages,
        },
        "batch_isend_irecv of 2, and waits": {"hpcdist": lambda: wait(batch()), "mpi4py": lambda: wait_all(requests())},
    }


def wait(works: Iterable[Any]) -> None:
    """Wait for Works."""
    for work in works:
        work.wait()
