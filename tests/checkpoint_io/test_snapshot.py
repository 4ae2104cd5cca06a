"""Copies of tensors in host memory: whole, of this moment, and in the same memory each time."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from checkpoint_io.async_save.staging import HostBuffers

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    torch.manual_seed(3)
    return (torch.randn(shape) * 10).to(dtype)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise, so that not-a-number counts too."""
    alike = left.dtype == right.dtype and left.shape == right.shape
    return alike and as_bytes(left) == as_bytes(right)


def test_copies_are_bitwise_of_every_dtype_and_shape():
    tensors = [make(dtype, *shape) for dtype in DTYPES for shape in ((), (1,), (0, 3), (5, 7))]
    tensors.append(torch.tensor([float("nan"), -0.0]))
    copies = HostBuffers().fill(tensors)
    assert all(map(same, copies, tensors))
    assert all(copy.is_contiguous() for copy in copies)


def test_copies_do_not_follow_the_tensors_not_even_on_the_cpu():
    weight = torch.nn.Parameter(torch.ones(1000))
    (copy,) = HostBuffers().fill([weight])
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(copy, torch.ones(1000))
    assert not copy.requires_grad


def test_views_that_are_not_contiguous_are_copied_in_their_own_order():
    table = torch.arange(24.0).reshape(4, 6)
    views = [table.t(), table[:, 1:3], table[::2], torch.ones(1).expand(5)]
    assert all(map(torch.equal, HostBuffers().fill(views), views))


def test_the_conjugate_of_a_tensor_is_copied_as_its_values():
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    (copy,) = HostBuffers().fill([tensor])
    assert torch.equal(copy.resolve_conj(), tensor.resolve_conj())
    assert not copy.is_conj()


def test_the_same_layout_is_copied_into_the_same_memory():
    buffers = HostBuffers()
    first = buffers.fill([torch.zeros(3), torch.zeros(2, 2)])
    second = buffers.fill([torch.ones(3), torch.ones(2, 2)])
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in second]
    assert torch.equal(second[1], torch.ones(2, 2))


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(3, dtype=torch.float64)])
def test_another_layout_gets_other_memory_and_the_old_is_freed(other):
    buffers = HostBuffers()
    memory = weakref.ref(buffers.fill([torch.zeros(3)])[0])
    assert memory() is not None
    (copy,) = buffers.fill([other])
    gc.collect()
    assert memory() is None
    assert torch.equal(copy, other)


def test_there_is_one_copy_of_what_was_given_and_none_after_free():
    buffers = HostBuffers()
    buffers.fill([torch.zeros(1 << 20), torch.zeros(1 << 18, dtype=torch.float64)])
    assert buffers.nbytes == 6 * 2**20
    buffers.free()
    assert buffers.nbytes == 0
    assert torch.equal(buffers.fill([torch.ones(2)])[0], torch.ones(2))


def test_nothing_to_copy_is_fine():
    assert HostBuffers().fill([]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device_are_copied_into_pinned_memory_and_are_of_this_moment():
    buffers, weight = HostBuffers(), torch.ones(1 << 20, device="cuda")
    for value in (1.0, 2.0):
        weight.fill_(value)
        copies = buffers.fill([weight, torch.ones(3)])
        weight.zero_()
        assert torch.equal(copies[0], torch.full((1 << 20,), value))
        assert all(copy.is_pinned() for copy in copies)
    buffers.free()
