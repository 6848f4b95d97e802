"""Abilities of the MPI world, each tried on a communicator: threads, lost ranks, GPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpcdist.backends.mpi.process import open_mpi, runtime
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.core.ranks import format_count, format_ranks

TITLE = "MPI: what it can do"


def look(comm: Any) -> Facts:
    if comm is None:
        return {"world": None}
    from mpi4py import MPI

    from hpcdist.backends.mpi import cuda

    tries_gpu = comm.Get_rank() == 0 and torch.cuda.is_available()
    levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
    return {
        "world": comm.Get_size(),
        "thread_level": levels.get(MPI.Query_thread(), "MULTIPLE"),
        "ulfm": look_at_revocation(comm),
        "gpu_memory": cuda.is_aware() if tries_gpu else None,
        "start_seconds": next(iter(runtime.START_SECONDS), 0.0),
        "has_btl_ofi": open_mpi.is_used(MPI),
    }


def look_at_revocation(comm: Any) -> str:
    """Revoke a communicator and shrink it, as a job does that continues without a lost rank."""
    from mpi4py import MPI

    own = comm.Dup()
    own.Set_errhandler(MPI.ERRORS_RETURN)
    own.Barrier()
    try:
        own.Revoke()
    except (NotImplementedError, MPI.Exception):
        own.Free()
        return "not in this MPI"
    if not runtime.is_fault_tolerant():
        return "not switched on"  # and MPI_Comm_shrink would wait forever
    try:
        shrunk = own.Shrink()
    except MPI.Exception as error:
        return f"shrink failed: {error}"
    size = shrunk.Get_size()
    shrunk.Free()
    return "works" if size == comm.Get_size() else f"shrink lost ranks: {size} of {comm.Get_size()}"


def judge(seen: list[Facts]) -> Iterator[Finding]:
    first = seen[0]
    if first["world"] is None:
        yield Finding(NOTE, "not tried: this job has no MPI world")
        return
    yield Finding(OK, f"MPI_COMM_WORLD has {format_count(first['world'], 'rank')}")
    low = [rank for rank, facts in enumerate(seen) if facts["thread_level"] != "MULTIPLE"]
    if low:
        level = seen[low[0]]["thread_level"]
        text = f"MPI gave thread level {level} on {format_ranks(low)}; async_op=True needs MULTIPLE"
        fix = "start MPI with MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level = 'multiple'), or use a build that has it"
        yield Finding(PROBLEM, text, fix)
    else:
        yield Finding(OK, "thread level MPI_THREAD_MULTIPLE: async_op=True makes progress in the background")
    yield ULFM.get(first["ulfm"]) or Finding(PROBLEM, f"ULFM: {first['ulfm']}")
    if first["has_btl_ofi"] and first["start_seconds"] >= open_mpi.SLEEP_SECONDS:
        yield Finding(
            ADVICE,
            f"MPI_Init took {first['start_seconds']:.1f} s; Open MPI sleeps for at least 1 s of it where it closes "
            "its component btl/ofi, which has no device here",
            "export OMPI_MCA_btl=^ofi   # unless MPI's windows between nodes go over libfabric",
        )
    if first["gpu_memory"]:
        yield Finding(OK, "MPI reads GPU memory (CUDA-aware)")
    elif first["gpu_memory"] is False:
        yield Finding(NOTE, "MPI cannot read GPU memory: hpcdist does not hand it any")


ULFM = {
    "works": Finding(OK, "ULFM: a communicator was revoked and shrunk; a job can survive a lost rank"),
    "not switched on": Finding(
        NOTE, "ULFM is in this MPI but not switched on: a lost rank ends the job", "mpirun --with-ft ulfm …"
    ),
    "not in this MPI": Finding(NOTE, "ULFM is not in this MPI: a lost rank ends the job"),
}
