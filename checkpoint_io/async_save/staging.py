"""Copy tensors into host memory that is reused from save to save."""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from checkpoint_io.errors import CheckpointWarning
from checkpoint_io.warning import warn

_ALIGNMENT = 64  # bytes; a cache line, and at least the alignment of any dtype
_TOUCHED = 16 << 20  # bytes that a reserve touches at a time
# Global, as memory belongs to the process.
_blocks: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # that forks do not have
_inherited: list[mmap.mmap] = []
_watches_forks = False

Layout = tuple[list[torch.Size], list[torch.dtype]]


class HostBuffers:
    """Host memory with a copy of each tensor of a save: one block, and a reserve before it.

    The memory is reused by the next save, unless shapes or dtypes change. It is pinned if a tensor
    is on a CUDA device, so that the copies run asynchronously, all at the same time. A forked
    process, such as a worker of a DataLoader, does not have it, and allocates its own.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._pinned = False
        self._process = os.getpid()
        self._copies: list[torch.Tensor] = []
        self._unpin: list[weakref.finalize[Any, Any]] = []
        self._reserve: _Reserve | None = None
        self.nbytes = 0

    def reserve(self, nbytes: int) -> None:
        """Take memory for the first save from the system on a thread, unless there is some."""
        if nbytes and self._layout is None and self._reserve is None:
            self._reserve = _Reserve(nbytes)

    def fill(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return host copies of the tensors, valid until the next call."""
        layout = [tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors]
        host = all(tensor.is_cpu for tensor in tensors)
        pinned = not host and any(tensor.is_cuda for tensor in tensors)
        if (layout, pinned, os.getpid()) != (self._layout, self._pinned, self._process):
            reserve, self._reserve = self._reserve, None
            self.free()  # first: host memory may not hold two copies of the state
            self._allocate(layout, pinned, [] if reserve is None else reserve.take())
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
        """Unpin and release the blocks; their memory is freed with the last copy."""
        for unpin in self._unpin:
            unpin()
        if self._reserve is not None:
            self._reserve.take()
        self._layout, self._pinned, self._unpin, self._reserve = None, False, [], None
        self._copies = []
        self.nbytes = 0

    def _allocate(self, layout: Layout, pinned: bool, blocks: list[torch.Tensor]) -> None:
        """Place all copies one after the other: in the reserve, what is over in another block."""
        room = sum(map(len, blocks))
        places, ends = [], [0, 0]  # in the reserve, and in the other block
        for shape, dtype in zip(*layout, strict=True):
            length = -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            index = 0 if ends[0] + length <= room else 1
            places.append((index, ends[index]))
            ends[index] += length
        blocks = [*(blocks or [_host_block(0)]), _host_block(ends[1])]
        for block in blocks:
            if pinned and len(block) and _pin(block):
                # This object holds the block, so the block is unpinned before it is freed.
                unpin = weakref.finalize(self, _unpin, block.data_ptr(), os.getpid())
                unpin.atexit = False
                self._unpin.append(unpin)
        self._copies = [
            blocks[index][begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (index, begin), shape, dtype in zip(places, *layout, strict=True)
        ]
        self._layout, self._pinned, self.nbytes = layout, pinned, sum(map(len, blocks))
        self._process = os.getpid()


class _Reserve:
    """A block of host memory whose pages a thread takes from the system.

    To take a page on first use costs more than to copy to it, twice and more.
    """

    def __init__(self, nbytes: int) -> None:
        self._block = _host_block(nbytes)
        self._process = os.getpid()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="checkpoint-reserve", daemon=True)
        self._thread.start()
        # The interpreter would end the thread inside of torch, which aborts the process.
        self._at_exit = weakref.finalize(self, _end_thread, self._thread, self._stopped)

    def _touch(self) -> None:
        """Write to each page; torch lets other threads run meanwhile."""
        for begin in range(0, len(self._block), _TOUCHED):
            if self._stopped.is_set():
                return
            self._block[begin : begin + _TOUCHED].zero_()

    def take(self) -> list[torch.Tensor]:
        """End the thread and return the block; nothing in a fork, which does not have it."""
        if self._process != os.getpid():
            return []
        self._at_exit()
        return [self._block]


def _end_thread(thread: threading.Thread, stopped: threading.Event) -> None:
    """Stop a reserve's thread and wait for its end."""
    stopped.set()
    if thread is not threading.current_thread():  # which may hold the last reference to the reserve
        thread.join()


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
