"""Pytest plugin: the facade's tests with every tensor going through a staging copy.

    HPCDIST_TEST_BACKEND=cpu:mpi_staged,cuda:mpi \
        mpirun -n 2 python -m pytest -p tests.fakes.mpi_staged --with-mpi tests/mpi

The copies, their order and what MPI is given are the real ones; the device is CPU memory, because there is no other.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hpcdist.backends.mpi import cuda as staging
from hpcdist.backends.mpi.backend import MPIBackend
from hpcdist.core import registry
from hpcdist.core.backend import Backend, Bootstrap
from tests.fakes import fake_nccl as fake


class Staged(staging.StagedBackend):
    name: ClassVar[str] = "mpi_staged"

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> Staged:
        staging.is_aware = bool  # it is not
        return cls.over(MPIBackend.connect(bootstrap))

    @classmethod
    def over(cls, inner: Any) -> Staged:
        return cls(inner, inner.collectives.is_shared, fake.FakeCuda())

    def run(self, *args: Any) -> None:
        fake.JOURNAL.clear()
        super().run(*args)

    def split(self, *args: Any) -> Backend | None:
        made = self.inner.split(*args)
        return None if made is None else self.over(made)

    def create_group(self, *args: Any) -> Backend:
        return self.over(self.inner.create_group(*args))

    def close(self) -> None:
        self.inner.close()


registry.ENTRIES["mpi_staged"] = registry.Entry("tests.fakes.mpi_staged", "Staged", ("cpu",), "")
