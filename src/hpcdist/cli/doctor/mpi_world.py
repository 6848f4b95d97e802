"""Abilities of the MPI world, each tried on a communicator: threads, lost ranks, large counts, GPU memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from hpcdist.backends.mpi.process import open_mpi, runtime
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.cli.doctor.mpi_library import output_of
from hpcdist.core.ranks import listed, plural

TITLE = "MPI: what it can do"

# in a process of its own: a library that cannot read GPU memory ends the process
SEND_FROM_GPU = """
import torch
from mpi4py import MPI
a, b = torch.arange(8, device='cuda'), torch.zeros(8, dtype=torch.int64, device='cuda')
torch.cuda.synchronize()
view = lambda t: [MPI.buffer.fromaddress(t.data_ptr(), t.nbytes), MPI.BYTE]
MPI.COMM_SELF.Sendrecv(view(a), 0, 0, view(b), 0, 0)
print('gpu', b.sum().item(), flush=True)
"""


def look(comm: Any) -> Facts:
    if comm is None:
        return {"world": None}
    from mpi4py import MPI

    tries_gpu = comm.Get_rank() == 0 and torch.cuda.is_available()
    levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
    return {
        "world": comm.Get_size(),
        "thread_level": levels.get(MPI.Query_thread(), "MULTIPLE"),
        "ulfm": look_at_revocation(comm),
        "large_counts": look_at_large_counts(MPI),
        "gpu_memory": "gpu 28" in output_of([sys.executable, "-c", SEND_FROM_GPU])[1] if tries_gpu else None,
        "start_seconds": next(iter(runtime.START_SECONDS), 0.0),
        "has_btl_ofi": open_mpi.is_used(MPI),
    }


def look_at_revocation(comm: Any) -> str:
    """Revoke a communicator and shrink it, which is how a job goes on without a lost rank."""
    from mpi4py import MPI

    own = comm.Dup()
    own.Set_errhandler(MPI.ERRORS_RETURN)
    if not hasattr(own, "Revoke"):
        return "unknown to this mpi4py"
    own.Barrier()
    try:
        own.Revoke()
    except (NotImplementedError, MPI.Exception):
        own.Free()
        return "not in this MPI"
    if not runtime.is_fault_tolerant():
        return "not switched on"  # and MPI_Comm_shrink would wait for ever
    try:
        shrunk = own.Shrink()
    except MPI.Exception as error:
        return f"shrink failed: {error}"
    size = shrunk.Get_size()
    shrunk.Free()
    return "works" if size == comm.Get_size() else f"shrink lost ranks: {size} of {comm.Get_size()}"


def look_at_large_counts(MPI: Any) -> bool:
    """Send more than 2^31 elements of a type without size to oneself."""
    nothing = MPI.BYTE.Create_contiguous(0).Commit()
    message = [bytearray(1), 2**31 + 8, nothing]
    try:
        MPI.COMM_SELF.Sendrecv(message, 0, 0, message, 0, 0)
    except (MPI.Exception, OverflowError, NotImplementedError):
        return False
    finally:
        nothing.Free()
    return True


def judge(ranks: list[Facts]) -> Iterator[Finding]:
    first = ranks[0]["mpi_world"]
    if first["world"] is None:
        yield Finding(NOTE, "not tried: this job has no MPI world")
        return
    yield Finding(OK, f"MPI_COMM_WORLD has {plural(first['world'], 'rank')}")
    low = [rank for rank, facts in enumerate(ranks) if facts["mpi_world"]["thread_level"] != "MULTIPLE"]
    if low:
        level = ranks[low[0]]["mpi_world"]["thread_level"]
        yield Finding(
            PROBLEM,
            f"MPI gave thread level {level} on {listed(low)}; async_op=True needs MULTIPLE",
            "start MPI with MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level = 'multiple'), or use a build that has it",
        )
    else:
        yield Finding(OK, "thread level MPI_THREAD_MULTIPLE: async_op=True makes progress in the background")
    yield ULFM.get(first["ulfm"]) or Finding(PROBLEM, f"ULFM: {first['ulfm']}")
    if first["large_counts"]:
        yield Finding(OK, "MPI takes counts above 2^31 - 1")
    else:
        yield Finding(OK, "MPI counts in C ints; hpcdist describes larger tensors by derived datatypes")
    if first["has_btl_ofi"] and first["start_seconds"] >= open_mpi.SLEEP_SECONDS:
        yield Finding(
            ADVICE,
            f"MPI_Init took {first['start_seconds']:.1f} s; Open MPI 5 sleeps for 1 s of it where it closes its "
            "component btl/ofi, which has no device here",
            "export OMPI_MCA_btl=^ofi   # unless MPI's windows between nodes go over libfabric",
        )
    if first["gpu_memory"] is True:
        yield Finding(OK, "MPI reads GPU memory (CUDA-aware)")
    elif first["gpu_memory"] is False:
        yield Finding(NOTE, "MPI cannot read GPU memory: hpcdist does not hand it any")


ULFM = {
    "works": Finding(OK, "ULFM: a communicator was revoked and shrunk; a job can survive a lost rank"),
    "not switched on": Finding(
        NOTE, "ULFM is in this MPI but not switched on: a lost rank ends the job", "mpirun --with-ft ulfm …"
    ),
    "not in this MPI": Finding(NOTE, "ULFM is not in this MPI: a lost rank ends the job"),
    "unknown to this mpi4py": Finding(ADVICE, "this mpi4py does not know ULFM", "pip install 'mpi4py>=4.1'"),
}
