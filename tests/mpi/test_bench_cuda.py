"""The comparison with torch's own group on a GPU as a whole: on CPU tensors, with gloo in NCCL's place."""

import pytest

import hpcdist as dist
from hpcdist.cli.bench import cuda as bench_cuda
from hpcdist.cli.bench import parser
from hpcdist.cli.bench.timing import Bench


def test_both_sides_are_measured_in_one_run(world, size, monkeypatch):
    if dist.get_backend() != "mpi":
        pytest.skip("the bench needs MPI")
    monkeypatch.setattr(bench_cuda, "CALLS", {1 << 12: 5})
    bench = Bench(parser().parse_args(["--collectives", "all", "--sizes", "4", "4K", "--rounds", "1"]))
    assert bench_cuda.measure(bench, "cpu", "gloo") in (0, 1)
    rows = {(each.what, each.nbytes) for each in bench.figures}
    assert len(rows) == 4 * 2 * 3 * 2
    assert len(bench.figures) == 2 * len(rows)
    assert all(each.median > 0 and each.side in ("hpcdist", "torch") for each in bench.figures)
    bench.comm.Free()


def test_an_unknown_collective_is_refused(world, size):
    if dist.get_backend() != "mpi":
        pytest.skip("the bench needs MPI")
    bench = Bench(parser().parse_args(["--collectives", "all_reduce_twice"]))
    with pytest.raises(SystemExit, match="known: all_reduce, broadcast"):
        bench_cuda.measure(bench, "cpu", "gloo")
    bench.comm.Free()
