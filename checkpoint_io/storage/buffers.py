"""Page-aligned buffers, reused and bounded in number."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

BUFFER_BYTES = 16 * 2**20
MAX_BUFFERED_BYTES = 256 * 10**6
_BY_HAND = 64 * 1024  # below that, releasing the GIL costs more than the copy
_HUGE_PAGE = 2 * 2**20


def aligned(length: int) -> memoryview[int]:
    """Return new page-aligned memory, as direct IO requires."""
    if sys.platform == "win32":
        return memoryview(mmap.mmap(-1, length))
    # the default, MAP_SHARED, is slower
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if length >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            # Direct reads into small pages take up to twice as long: each page is pinned by itself.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def copy_into(target: memoryview[int], source: memoryview[int]) -> None:
    """Copy bytes between views of the same length; long copies release the GIL."""
    if len(source) < _BY_HAND:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class BufferPool:
    """Buffers of one size for all files that a store writes at a time, `limit` bytes in total.

    Each writer holds the pool (`held`); returned buffers are freed when the last one leaves.
    """

    def __init__(self, limit: int = MAX_BUFFERED_BYTES, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.buffer_bytes = buffer_bytes
        self._left = limit // buffer_bytes
        self._free: list[memoryview[int]] = []
        self._holders = 0
        self._lock = threading.Lock()

    def take(self) -> memoryview[int] | None:
        """Return a buffer, None if the bound is reached; never block."""
        with self._lock:
            if self._left == 0:
                return None
            buffer = self._free.pop() if self._free else aligned(self.buffer_bytes)
            self._left -= 1
            return buffer

    def give(self, buffers: list[memoryview[int]]) -> None:
        """Return buffers to the pool and empty the list."""
        with self._lock:
            self._left += len(buffers)
            self._free += buffers
            buffers.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep returned buffers for the next file during the block."""
        with self._lock:
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._free.clear()
