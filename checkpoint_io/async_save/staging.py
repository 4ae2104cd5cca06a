"""Copy tensors into host memory that is reused from save to save."""

from __future__ import annotations

import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from checkpoint_io.errors import CheckpointWarning
from checkpoint_io.warning import warn

_ALIGNMENT = 64  # bytes; a cache line, and at least the alignment of any dtype
# Global, as memory belongs to the process.
_blocks: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # that forks do not have
_inherited: list[mmap.mmap] = []
_watches_forks = False

Layout = tuple[list[torch.Size], list[torch.dtype]]


class HostBuffers:
    """One block of host memory with a copy of each tensor of a save.

    The block is reused by the next save, unless shapes or dtypes change. It is pinned if a tensor
    is on a CUDA device, so that the copies run asynchronously, all at the same time. A forked
    process, such as a worker of a DataLoader, does not have it, and allocates one of its own.

    Example:
        >>> import torch
        >>> from checkpoint_io.async_save.staging import HostBuffers
        >>> buffers, weight = HostBuffers(), torch.ones(2)
        >>> copies = buffers.fill([weight])
        >>> _ = weight.zero_()
        >>> copies[0], buffers.nbytes
        (tensor([1., 1.]), 64)
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._pinned = False
        self._process = os.getpid()
        self._copies: list[torch.Tensor] = []
        self._unpin: weakref.finalize[Any, Any] | None = None
        self.nbytes = 0

    def fill(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return host copies of the tensors, valid until the next call."""
        layout = [tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors]
        host = all(tensor.is_cpu for tensor in tensors)
        pinned = not host and any(tensor.is_cuda for tensor in tensors)
        if (layout, pinned, os.getpid()) != (self._layout, self._pinned, self._process):
            self.free()  # first: host memory may not hold two copies of the state
            self._allocate(layout, pinned)
        with torch.no_grad():
            if host and tensors:  # one call for all: most are small
                torch._foreach_copy_(self._copies, list(tensors))
            else:
                for copy, tensor in zip(self._copies, tensors, strict=True):
                    copy.copy_(tensor, non_blocking=pinned and tensor.is_cuda)
        # The caller may change the tensors as soon as this returns.
        for device in {tensor.device for tensor in tensors if tensor.is_cuda} if pinned else ():
            torch.cuda.current_stream(device).synchronize()
        return list(self._copies)

    def free(self) -> None:
        """Unpin and release the block; its memory is freed with the last copy."""
        if self._unpin is not None:
            self._unpin()
        self._layout, self._pinned, self._unpin = None, False, None
        self._copies = []
        self.nbytes = 0

    def _allocate(self, layout: Layout, pinned: bool) -> None:
        """Allocate one block for all copies, one after the other."""
        begins, end = [], 0
        for shape, dtype in zip(*layout, strict=True):
            begins.append(end)
            length = math.prod(shape) * dtype.itemsize
            end += -(-length // _ALIGNMENT) * _ALIGNMENT
        block = _host_block(end)
        if pinned and end and _pin(block):
            # This object holds the block, so the block is unpinned before it is freed.
            self._unpin = weakref.finalize(self, _unpin, block.data_ptr(), os.getpid())
            self._unpin.atexit = False
        self._copies = [
            block[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for begin, shape, dtype in zip(begins, *layout, strict=True)
        ]
        self._layout, self._pinned, self.nbytes = layout, pinned, end
        self._process = os.getpid()


def _host_block(nbytes: int) -> torch.Tensor:
    """Allocate host memory that a fork does not copy, where the system has such memory.

    The device goes on writing to pinned pages after a fork: the copy on write must not give this
    process others. And the pages of a save are not held twice while workers live.
    """
    global _watches_forks
    if nbytes and sys.platform == "linux" and hasattr(mmap, "MADV_DONTFORK"):
        if not _watches_forks:
            os.register_at_fork(after_in_child=_keep_inherited)
            _watches_forks = True
        with suppress(OSError):
            # of its own pages: whatever shared one with the block would be missing in a fork
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_DONTFORK)
            _blocks.add(memory)
            return torch.frombuffer(memory, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _keep_inherited() -> None:
    """Keep the blocks of the parent: to free one unmaps what a fork has at its address by now."""
    _inherited.extend(_blocks)


def _pin(block: torch.Tensor) -> bool:
    """Pin exactly this block; `pin_memory` would round its size up to a power of two."""
    cuda: Any = torch.cuda
    # cudaHostRegisterPortable (1): pinned for all devices
    code = int(cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 1))
    if code:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # else the next kernel reports this error as its own
        warn(
            f"{block.numel():,} bytes of host memory could not be pinned (CUDA error {code}), so "
            "copies from the device are slower: raise `ulimit -l`, or give the job more memory",
            CheckpointWarning,
        )
    return code == 0


def _unpin(address: int, process: int) -> None:
    """Unpin a block; do nothing in a forked child, which has no CUDA context."""
    if process == os.getpid():
        cuda: Any = torch.cuda
        cuda.cudart().cudaHostUnregister(address)
