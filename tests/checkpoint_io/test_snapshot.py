"""Copies of tensors in host memory: whole, of this moment, and in the same memory each time."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from checkpoint_io.async_save import staging
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


# --- forks ------------------------------------------------------------------------------------

needs_madvise = pytest.mark.skipif(
    not (hasattr(mmap, "MADV_DONTFORK") and Path("/proc/self/smaps").exists()),
    reason="this system has no memory that forks do not have, or does not tell",
)


def flags_of(address: int) -> set[str]:
    """What the kernel has noted of the memory at an address, as in proc(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"no memory at {address:#x}")


@needs_madvise
def test_forks_do_not_have_the_copies_but_all_that_is_beside_them():
    buffers = HostBuffers()
    copies = buffers.fill([torch.ones(3), torch.ones(1 << 20)])
    assert all("dc" in flags_of(copy.data_ptr()) for copy in copies)  # "do not copy on fork"
    first, last = copies[0].data_ptr(), copies[1].data_ptr() + copies[1].nbytes
    assert first % mmap.PAGESIZE == 0, "or the memory of others would be missing in a fork too"
    end = -(-last // mmap.PAGESIZE) * mmap.PAGESIZE
    probe = torch.ones(1 << 16)
    assert not first <= probe.data_ptr() < end
    assert "dc" not in flags_of(probe.data_ptr())


class Snapshots(Dataset[list[float]]):
    """Uses the parent's buffers in a worker, where their memory is missing."""

    def __init__(self, buffers: HostBuffers, tensors: list[torch.Tensor]) -> None:
        self.buffers, self.tensors = buffers, tensors

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[float]:
        return [copy.sum().item() for copy in self.buffers.fill(self.tensors)]


@pytest.mark.parametrize("count", [4, 1 << 20])
def test_a_forked_worker_copies_into_memory_of_its_own(count):
    buffers, tensors = HostBuffers(), [torch.ones(count), torch.ones(2)]
    copies = buffers.fill(tensors)
    loader = DataLoader(
        Snapshots(buffers, tensors),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert list(loader) == [[float(count), 2.0]]
    assert [copy.sum().item() for copy in copies] == [float(count), 2.0]


class Reused(Dataset[str]):
    """Maps memory where the parent's block was, and then frees what it has inherited of it."""

    def __init__(self, buffers: HostBuffers, address: int, nbytes: int) -> None:
        self.buffers: HostBuffers | None = buffers
        self.address, self.nbytes = address, nbytes

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        readable, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        place = libc.mmap(self.address, self.nbytes, readable, private, -1, 0)
        if place != self.address:
            return f"{self.address:#x} is not free in the fork"
        ctypes.memset(place, 7, self.nbytes)
        assert self.buffers is not None
        self.buffers.free()
        self.buffers = None
        gc.collect()
        return str(ctypes.string_at(place, self.nbytes) == bytes([7]) * self.nbytes)


@needs_madvise
def test_a_fork_frees_no_memory_that_is_its_own_by_now():
    buffers = HostBuffers()
    address = buffers.fill([torch.ones(1 << 20)])[0].data_ptr()
    data = Reused(buffers, address, buffers.nbytes)
    del buffers
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == ["True"]


def test_without_such_memory_copies_are_in_plain_memory(monkeypatch):
    def refuses(*args, **kwargs):
        raise OSError("no memory of this kind")

    monkeypatch.setattr(staging.mmap, "mmap", refuses)
    (copy,) = HostBuffers().fill([torch.ones(4)])
    assert copy.tolist() == [1.0] * 4


def within(copy: torch.Tensor, block: torch.Tensor) -> bool:
    end = block.data_ptr() + block.numel()
    return block.data_ptr() <= copy.data_ptr() <= copy.data_ptr() + copy.nbytes <= end


def faults() -> int:
    resource = pytest.importorskip("resource")
    return int(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of a thread")
def test_the_pages_of_a_reserve_are_there_before_the_copy() -> None:
    weights = [torch.full((2 << 20,), 1.0), torch.full((2 << 20,), 2.0)]
    buffers = HostBuffers()
    buffers.reserve(sum(weight.nbytes for weight in weights))
    reserve = buffers._reserve
    assert reserve is not None
    reserve._thread.join()
    block, before = reserve._block, faults()
    copies = buffers.fill(weights)
    assert faults() - before < 500  # of 4096 pages
    assert all(within(copy, block) for copy in copies)
    assert all(map(torch.equal, copies, weights))
    assert buffers.nbytes == 16 << 20


def test_what_a_reserve_has_no_room_for_gets_memory_of_its_own() -> None:
    weights = [torch.full((size,), float(size)) for size in (100, 3000, 20)]
    buffers = HostBuffers()
    buffers.reserve(600)
    reserve = buffers._reserve
    assert reserve is not None
    copies = buffers.fill(weights)
    assert [within(copy, reserve._block) for copy in copies] == [True, False, True]
    assert all(map(torch.equal, copies, weights))
    assert buffers.nbytes == 600 + 3000 * 4 + 32
    again = buffers.fill(weights)
    assert [copy.data_ptr() for copy in again] == [copy.data_ptr() for copy in copies]
    buffers.fill(weights[:1])  # another layout, for which nothing is left of the reserve
    assert buffers.nbytes == 448


def test_memory_is_reserved_before_the_first_copy_only() -> None:
    buffers = HostBuffers()
    buffers.reserve(0)
    assert buffers._reserve is None
    buffers.reserve(64)
    first = buffers._reserve
    buffers.reserve(1 << 20)
    assert buffers._reserve is first
    buffers.fill([torch.ones(2)])
    buffers.reserve(1 << 20)
    assert buffers._reserve is None
    buffers.free()
    buffers.reserve(1 << 30)
    thread = buffers._reserve._thread  # type: ignore[union-attr]
    buffers.free()
    assert buffers._reserve is None
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_does_not_have_the_reserve() -> None:
    buffers, weight = HostBuffers(), torch.ones(1 << 10)
    buffers.reserve(1 << 20)
    child = os.fork()
    if not child:
        (copy,) = buffers.fill([weight])
        os._exit(0 if torch.equal(copy, weight) and buffers.nbytes == 1 << 12 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(buffers.fill([weight])[0], weight)
    assert buffers.nbytes == 1 << 20
