"""Buffers: what stands for a caller's tensor, and what is copied back."""

import numpy as np
import pytest
import torch

from hpcdist.core import buffers
from hpcdist.core.errors import MismatchError

NOT_PLAIN = {
    "strided": lambda: torch.zeros(3, 2).t(),
    "with a gradient": lambda: torch.zeros(2, requires_grad=True),
    "lazily conjugated": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "lazily negated": lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse, in rows": lambda: torch.eye(2).to_sparse_csr(),
    "of oneDNN": lambda: torch.eye(2).to_mkldnn(),
    "a subclass": lambda: torch.zeros(2).as_subclass(type("Sub", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain(name):
    assert not buffers.is_plain(NOT_PLAIN[name]())
    assert buffers.is_plain(torch.zeros(2))


def test_arrays_and_tensors_share_the_callers_memory():
    array = np.zeros(3, dtype=np.float32)
    buffers.as_tensor(array, "x", writable=True).fill_(5)
    assert array.tolist() == [5, 5, 5]
    given = torch.zeros(2, requires_grad=True)
    tensor = buffers.as_tensor(given, "x")
    assert not tensor.requires_grad
    assert tensor.data_ptr() == given.data_ptr()


def test_arrays_that_may_not_be_written():
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="parameter `x` is a read-only"):
        buffers.as_tensor(array, "x", writable=True)
    buffers.as_tensor(array, "x").fill_(1)
    assert array.tolist() == [0, 0, 0]  # a copy was read


@pytest.mark.parametrize("value", [None, 1, "text", [1.0]])
def test_what_is_no_tensor_is_named(value):
    with pytest.raises(TypeError, match=r"`x` of type torch.Tensor .* but got"):
        buffers.as_tensor(value, "x")
    with pytest.raises(TypeError, match=r"List\[torch.Tensor\]"):
        buffers.as_tensors([torch.ones(1), value], "x")


def test_copies_have_the_values_that_the_caller_sees():
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert buffers.for_reading(tensor).tolist() == [1 - 2j, 3 + 4j]
    plain = torch.zeros(2)
    assert buffers.for_reading(plain).data_ptr() == plain.data_ptr()
    assert buffers.for_writing(plain) is plain
    strided = torch.zeros(2, 2)[:, 0]
    assert buffers.for_writing(strided) is not strided


def test_values_reach_memory_that_several_elements_share():
    memory = torch.zeros(3)
    buffers.copy_into(torch.tensor([[1.0, 2.0, 3.0]] * 4), memory.expand(4, 3))
    assert memory.tolist() == [1, 2, 3]
    flat = torch.arange(5.0)
    outputs = [torch.zeros(2), torch.zeros(3, 2)[:, 1]]
    buffers.make_unpack(flat, outputs)()
    assert [each.tolist() for each in outputs] == [[0, 1], [2, 3, 4]]


def test_overlap():
    memory = torch.zeros(10)
    assert buffers.overlap(memory[:5], memory[4:])
    assert not buffers.overlap(memory[:5], memory[5:])
    assert buffers.overlap(memory, memory[3:4])


@pytest.mark.parametrize(
    ("splits", "size", "text"),
    [
        (None, 3, "does not divide equally"),
        ([1, 3], 3, "has 2 entries, the group 3 ranks"),
        ([1, 1, 1], 3, "add up to 3, input has 4 rows"),
        ([5, -1, 0], 3, "add up to 4, input has 4 rows; none may be below zero"),
    ],
)
def test_splits_that_do_not_fit(splits, size, text):
    with pytest.raises(RuntimeError, match=text):
        buffers.rows_of(torch.zeros(4, 2), splits, size, "input")


def test_splits_in_elements():
    assert buffers.rows_of(torch.zeros(4, 2), [1, 0, 3], 3, "input") == [2, 0, 6]
    assert buffers.rows_of(torch.zeros(6, 5), None, 3, "input") == [10, 10, 10]
    assert buffers.rows_of(torch.zeros(0, 5), [0, 0], 2, "input") == [0, 0]
    assert buffers.as_splits(np.array([1, 2])) == [1, 2]
    assert buffers.as_splits(None) is None


def test_dtypes_that_differ():
    buffers.same_dtype(torch.zeros(1), torch.zeros(1, dtype=torch.complex64))  # a complex type goes with its parts
    with pytest.raises(MismatchError, match=r"torch.float32 and torch.int64"):
        buffers.same_dtype(torch.zeros(1), torch.zeros(1, dtype=torch.int64))


def test_bytes_of_a_single_element_whatever_its_stride():
    single = torch.full((1, 2), 1.0)[:, :1].expand(1, 1)[:, 0]
    odd = torch.arange(6.0).view(3, 2)[1:2, 1]
    for tensor in (single, odd, torch.tensor(3.0), torch.zeros(0), torch.ones(2, 3)):
        assert tensor.is_contiguous()
        assert bytes(buffers.as_bytes(tensor).tolist()) == tensor.numpy().tobytes()


def test_tensors_that_belong_together_have_one_size():
    like = torch.ones(3, dtype=torch.complex64)
    buffers.check_sizes("gather", "gather_list", [torch.ones(3, dtype=torch.complex64), torch.ones(6)], like)
    with pytest.raises(MismatchError, match="invalid tensor size: the one of `gather_list` with index 1 has 2 el"):
        buffers.check_sizes("gather", "gather_list", [like, torch.ones(2, dtype=torch.complex64)], like)
