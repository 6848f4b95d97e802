"""Pytest plugin that puts the stand-in for NCCL under the facade, so that the facade's tests run through the backend.

    HPCDIST_TEST_BACKEND=cpu:nccl_stand_in,cuda:mpi PYTHONPATH=src:tests/fakes \
        mpirun -n 4 python -m pytest -p nccl_stand_in tests/mpi

runs every test of the CPU surface through the NCCL backend: its choice of calls, its groups, its streams and its
bootstrap over MPI are the real ones, and what NCCL's calls would do to GPU memory, ``fake_nccl`` does to CPU memory.
What NCCL lacks is skipped, with the error that the user would see as the reason.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hpcdist.backends.mpi.process import runtime
from hpcdist.backends.nccl.backend import NCCLBackend
from hpcdist.backends.nccl.library import Library
from hpcdist.core import registry
from hpcdist.core.backend import Bootstrap
from tests.fakes import fake_nccl as fake

MEETING: list[Path] = []


def find(ids: list[bytes], rank: int, size: int) -> Any:
    """Return an MPI communicator of those who were told the same ids, as NCCL's own start-up would find them."""
    world = runtime.world()
    name = hashlib.sha256(b"".join(ids)).hexdigest()
    (MEETING[0] / f"{name}-{rank}.new").write_text(str(world.Get_rank()))
    (MEETING[0] / f"{name}-{rank}.new").rename(MEETING[0] / f"{name}-{rank}")
    ranks = []
    for each in range(size):
        path = MEETING[0] / f"{name}-{each}"
        while not path.exists():
            time.sleep(0.001)
        ranks.append(int(path.read_text()))
    return world.Create_group(world.Get_group().Incl(ranks), int(name[:6], 16) % 32767)


class StandIn(NCCLBackend):
    """The NCCL backend on CPU memory."""

    name: ClassVar[str] = "nccl_stand_in"
    version: ClassVar[tuple[int, ...]] = (2, 30, 0)
    device = torch.device("cpu")

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> StandIn:
        """Make the group's backend; its ids go over a communicator of MPI."""
        if not MEETING:
            world = runtime.world()
            MEETING.append(Path(world.bcast(tempfile.mkdtemp() if world.Get_rank() == 0 else None)))
            atexit.register(shutil.rmtree, MEETING[0], ignore_errors=True)
            fake.FIND = find
        library = Library(fake.CORE, fake.BINDINGS, fake.FAILURES, cls.version)
        backend = cls(bootstrap.rank, bootstrap.size, library, None, fake.FakeCuda())
        backend.peer = backend._owned_peer = registry.connect("mpi", bootstrap)
        return backend

    def _connect(self, device: torch.device) -> Any:
        import hpcdist.backends.nccl.bootstrap as finding

        kept, finding.check_devices = finding.check_devices, lambda peer, device: None  # the CPU is everybody's
        try:
            return super()._connect(device)
        finally:
            finding.check_devices = kept

    def run(self, row: Any, send: Any, recv: Any, op: Any, root: Any, counts: Any) -> None:
        """Check, which the short way for CPU tensors leaves to the backend, and run."""
        if row.reduces:
            self.check_reduction(row, send.dtype, op)
        fake.JOURNAL.clear()
        super().run(row, send, recv, op, root, counts)


registry.ENTRIES["nccl_stand_in"] = registry.Entry("tests.fakes.nccl_stand_in", "StandIn", ("cpu",), "")

LACKS = ("on NCCL:", "NCCL cannot receive from anyone", "NCCL carries a message to oneself")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Any:
    try:
        return (yield)
    except RuntimeError as error:
        if any(text in str(error) for text in LACKS):
            pytest.skip(str(error)[:100])
        raise


# what holds on a GPU, or over MPI, and not here: the stand-in's streams are the host itself
ELSEWHERE = {
    "test_wait_with_a_limit": "a call of the stand-in blocks the host",
    "test_send_and_recv": "NCCL cannot receive from anyone",
    "test_any_source_and_tags": "NCCL cannot receive from anyone, and has no tags",
    "test_groups_asked_in_different_orders_do_not_block": "a call of the stand-in blocks the host",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = ELSEWHERE.get(getattr(item, "originalname", item.name))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
