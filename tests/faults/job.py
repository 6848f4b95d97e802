"""One job with one fault: mpirun -n 3 python job.py FAULT CALL. Rank FAULT_VICTIM (1) is the one that goes wrong.

Each rank writes a line of JSON for what happens to it, and then waits to be ended by the test.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch

import hpcdist as dist
from hpcdist.watch import question
from tests.faults.telling import imitate_nodes, tell

VICTIM = int(os.environ.get("FAULT_VICTIM", "1"))
SECOND = int(os.environ.get("FAULT_SECOND", "-1"))  # a rank that ends by os._exit at the same time
SECONDS = float(os.environ.get("FAULT_TIMEOUT", "2"))
question.FAN = int(os.environ.get("FAULT_FAN", question.FAN))  # how many ranks one rank asks by itself
tensor = torch.ones(int(os.environ.get("FAULT_COUNT", "8")))


def receive() -> None:
    if rank == VICTIM:
        dist.send(tensor, 0)
    elif rank == 0:
        dist.recv(tensor, VICTIM)


def reduce_beside_computing() -> None:
    """Wait for a call that the worker thread is in."""
    work = dist.all_reduce(tensor, async_op=True)
    time.sleep(0.1)
    work.wait()


def begin_all() -> list[dist.Work]:
    """Begin a message to and from every other rank."""
    ops = [dist.P2POp(op, tensor.clone(), other) for other in others() for op in (dist.irecv, dist.isend)]
    return dist.batch_isend_irecv(ops)


def others() -> list[int]:
    return [other for other in range(size) if other != rank]


def receive_object() -> None:
    if rank == VICTIM:
        dist.send_object_list([tensor], 0)
    elif rank == 0:
        dist.recv_object_list([None], VICTIM)


CALLS = {
    "all_reduce": lambda: dist.all_reduce(tensor),
    "broadcast": lambda: dist.broadcast(tensor, VICTIM),
    "all_gather": lambda: dist.all_gather_into_tensor(tensor.new_empty(size * tensor.numel()), tensor),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(tensor.new_empty(tensor.numel() // size), tensor),
    "nodes": dist.new_subgroups,  # asks on which node each rank is
    "store": lambda: torch.distributed.distributed_c10d._get_default_store().set("key", "value"),
    "reproducible": lambda: dist.reproducible().__enter__(),
    "new_group": lambda: dist.new_group(list(range(size))),
    "broadcast_object": lambda: dist.broadcast_object_list([tensor.numpy()], VICTIM),
    "gather_object": lambda: dist.gather_object(tensor.numpy(), [None] * size if rank == 0 else None),
    "recv": receive,
    "barrier": dist.barrier,
    "all_gather_object": lambda: dist.all_gather_object([None] * size, {"rank": rank}),
    "async": reduce_beside_computing,
    "exchange": lambda: dist.exchange(dict.fromkeys(others(), tensor), {o: tensor.clone() for o in others()}),
    "batch": lambda: [work.wait() for work in begin_all()],
    "halo": lambda: dist.HaloExchange([size], periodic=True)(tensor),
    "scatter_object": lambda: dist.scatter_object_list([None], [rank] * size, VICTIM),
    "recv_object": receive_object,
    "subgroups": lambda: dist.new_subgroups(size),
    "local_group": lambda: dist.new_group(list(range(size)), use_local_synchronization=True),
    "window": lambda: dist.Window(tensor.numel()),
    "put": lambda: window.put(tensor, VICTIM),
    "get": lambda: window.get(tensor, VICTIM),
    "accumulate": lambda: window.accumulate(tensor, VICTIM),
    "fetch_and_add": lambda: window.fetch_and_add(VICTIM),
    "signal": lambda: window.signal(VICTIM),
    "wait_signal": lambda: window.wait_signal(VICTIM),
    "close": lambda: window.close(),
    "waited": lambda: dist.all_reduce(tensor, async_op=True).wait(),  # carried out by the wait, as a synchronous call
}

ONE_SIDED = ("put", "get", "accumulate", "fetch_and_add", "signal")
ON_WINDOW = (*ONE_SIDED, "wait_signal", "close")


def go_wrong(fault: str, call: str) -> None:
    global tensor
    tell("fault")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop_sending":  # the others' receives have begun, and cannot be cancelled
        begun = begin_all()  # noqa: F841
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "exception":
        raise ZeroDivisionError("the victim's own")
    elif fault == "exit":
        sys.exit(3)
    elif fault == "leave":  # past Python's exit, and MPI's
        os._exit(3)
    elif fault == "absent":
        signal.pause()
    elif fault == "other":  # a collective that the others do not call
        dist.reduce(tensor, 0) if call != "recv" else dist.barrier()
    elif fault == "shape":
        tensor = torch.ones(16)
        CALLS[call]()


def leave(seconds: float) -> None:
    """Let all but one rank leave the program, and that one later."""
    if dist.get_rank() == 0:
        time.sleep(seconds)
        tell("late", failed=dist.failed_ranks())
    dist.destroy_process_group()


def main(fault: str, call: str) -> None:
    global window
    CALLS["all_reduce"]()
    if call in ON_WINDOW:
        window = dist.Window(tensor.numel())
    dist.barrier()
    dist.group.WORLD.timeout = timedelta(seconds=SECONDS)
    tell("ready")
    time.sleep(1.1)  # the watchdog looks once a second until then
    try:
        if rank == SECOND:
            go_wrong("leave", call)
        if rank == VICTIM:
            go_wrong(fault, call)
        else:
            # what ends without a call of the victim may end before the fault
            may_pass = (call == "broadcast" and fault in ("kill", "exit")) or (call in ONE_SIDED and fault == "stop")
            for _ in range(1000 if may_pass else 1):
                CALLS[call]()
    except RuntimeError as error:
        tell("raised", kind=type(error).__name__, text=str(error))
        if os.environ.get("FAULT_SHRINK") and rank != VICTIM:
            start = time.perf_counter()
            dist.shrink_group([VICTIM] if SECOND < 0 else [VICTIM, SECOND])
            took = time.perf_counter() - start
            values = torch.ones(4)
            dist.all_reduce(values)
            tell("shrunk", seconds=took, rank_now=dist.get_rank(), size=dist.get_world_size(), sum=values.tolist())
            if seconds := os.environ.get("FAULT_LEAVE"):
                leave(float(seconds))
                return
    else:
        tell("passed", value=tensor[0].item())
    signal.pause()


if __name__ == "__main__":
    imitate_nodes()
    # on a busy machine a rank may be late for the first calls
    dist.init_process_group(timeout=timedelta(seconds=float(os.environ.get("FAULT_START", "60"))))
    rank, size = dist.get_rank(), dist.get_world_size()
    main(*sys.argv[1:])
