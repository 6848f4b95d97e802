"""Settings that decide about calls: a difference between ranks ends the start on every rank, with its cause."""

import pytest

import hpcdist as dist
from hpcdist.core.agreement import check_same
from hpcdist.core.ranks import format_ranks
from tests.ranks import sum_of_ranks

from .conftest import BACKEND

pytest.importorskip("mpi4py")
from hpcdist.backends.mpi.node.thresholds import VARIABLE

OTHER = "TORCH_DISTRIBUTED_DEBUG"


def test_a_difference_is_named_on_every_rank(two_ranks, world, rank, size):
    for odd_one in range(size):
        with pytest.raises(dist.DistBackendError) as raised:
            check_same(world.cpu, {"A": "same", "B": "64K" if rank == odd_one else "off"})
        text = str(raised.value)
        others = format_ranks([each for each in range(size) if each != odd_one])
        assert f"'64K' on rank {odd_one}" in text
        assert f"'off' on {others}" in text
        assert "B is" in text
        assert "A is" not in text
    assert sum_of_ranks() == size  # nothing is lost


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (VARIABLE, ("64K", "off")),
        (VARIABLE, ("1", "off")),  # the comparison itself must not go by what it compares
        (OTHER, ("DETAIL", "OFF")),
    ],
)
def test_init_process_group_refuses_ranks_that_differ(name, values, rank, size, monkeypatch):
    if size == 1 or (name == VARIABLE and dist.get_backend() != "mpi"):
        pytest.skip("needs several ranks, of MPI")
    dist.destroy_process_group()
    try:
        monkeypatch.setenv(name, values[rank % 2])
        with pytest.raises(dist.DistBackendError, match=name):
            dist.init_process_group(BACKEND)
        assert not dist.is_initialized()
    finally:
        monkeypatch.undo()
        dist.init_process_group(BACKEND)
    assert sum_of_ranks() == size
