"""The backend's tables, held against the real nccl4py."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from hpcdist.backends.nccl import datatypes
from hpcdist.core import reduction
from hpcdist.core.table import ALL_REDUCE

OPS = {
    name: getattr(ReduceOp.RedOpType, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
OPS["PREMUL_SUM"] = torch.distributed._make_nccl_premul_sum(2.0)


def nccl_core():
    return pytest.importorskip("nccl.core", reason="nccl4py is not installed (pip install 'hpcdist[nccl-cu12]')")


@pytest.mark.parametrize("dtype", datatypes.DATATYPES)
def test_a_dtype_is_nccl4pys(dtype: torch.dtype) -> None:
    core = nccl_core()
    known = core.NcclDataType[datatypes.DATATYPES[dtype]]
    assert core.torch._to_nccl_dtype(dtype) == known
    assert known.itemsize == dtype.itemsize


def test_no_dtype_that_nccl4py_takes_is_left_out() -> None:
    core = nccl_core()
    taken = set()
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        try:
            core.torch._to_nccl_dtype(dtype)
        except core.NcclInvalid:
            continue
        taken.add(dtype)
    assert taken == set(datatypes.DATATYPES)
    names = {each.name for each in core.NcclDataType}  # iterating an enum leaves aliases out
    assert {datatypes.DATATYPES[dtype] for dtype in taken} == names


def test_the_ops_are_nccl4pys_and_none_is_left_out() -> None:
    core = nccl_core()
    for table in (datatypes.OPS, datatypes.BOOL_OPS, datatypes.COMPLEX_OPS):
        assert set(table.values()) <= {each.name for each in core.NcclRedOp}
    assert set(datatypes.OPS.values()) == {each.name for each in core.NcclRedOp}


def test_a_result_in_progress_is_nccls_number() -> None:
    nccl_core()
    from nccl.bindings import nccl as bindings

    from hpcdist.backends.nccl.communicators import IN_PROGRESS

    assert int(bindings.Result.InProgress) == IN_PROGRESS
    assert int(bindings.Result.Success) == 0


def reduces(dtype: torch.dtype, op: object, float8: bool = True) -> bool:
    try:
        datatypes.check(ALL_REDUCE, dtype, op, float8)
    except (RuntimeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("dtype", reduction.KIND_OF)
@pytest.mark.parametrize("name", OPS)
def test_what_nccl_lacks_is_an_error_that_names_the_way_over_mpi(dtype: torch.dtype, name: str) -> None:
    op = OPS[name]
    has = dtype in datatypes.DATATYPES and name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")
    if dtype is torch.bool:
        has = name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR")
    if dtype.is_complex:
        has = name in ("SUM", "AVG", "PREMUL_SUM")
    if dtype in (torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64):
        has = name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    if has:
        datatypes.check(ALL_REDUCE, dtype, op, True)
        return
    with pytest.raises((RuntimeError, ValueError)) as caught:
        datatypes.check(ALL_REDUCE, dtype, op, True)
    if name in {reduction.name_of(known) for known in reduction.KINDS[reduction.KIND_OF[dtype]]}:
        assert "MPI has it" in str(caught.value)
        assert str(dtype) in str(caught.value)
    else:  # it means nothing anywhere
        assert "MPI" not in str(caught.value)


@pytest.mark.parametrize("dtype", datatypes.FLOAT8)
def test_float8_reduces_where_gpu_and_release_do(dtype: torch.dtype) -> None:
    assert reduces(dtype, OPS["SUM"], float8=True)
    assert not reduces(dtype, OPS["SUM"], float8=False)
