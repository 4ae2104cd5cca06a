"""A window over the offloaded weights: buffers for a few units, and a thread that reads ahead."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from accel_callbacks.models.offload.device_copies import DeviceCopies
from accel_callbacks.models.offload.source import WeightReadError

__all__ = ["Traffic", "Window"]

_TICK = 0.5  # seconds between looks at a read that takes long


@dataclass
class Traffic:
    """The traffic of a window, in bytes, counts and seconds.

    Args:
        bytes_read: from files or host memory, with what was read along.
        fetches: units that were read.
        hits: uses of a unit that was there, or on its way.
        misses: uses of a unit that nobody had asked for.
        escapes: buffers that were given up, because somebody kept a view of their weights.
        waited: seconds for which a computation waited.
        peak: most bytes of buffers at a time.
    """

    bytes_read: int = 0
    fetches: int = 0
    hits: int = 0
    misses: int = 0
    escapes: int = 0
    waited: float = 0.0
    peak: int = 0


class _Buffer:
    """Memory for one unit at a time."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.nbytes = memory.untyped_storage().nbytes()
        self.streams: dict[Any, None] = {}  # that have computed with it
        self._idle = self._uses()

    def _uses(self) -> int:
        # Autograd's saved tensors count too, which Python's reference counts do not show.
        count: int = torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata)
        return count

    def is_viewed(self) -> bool:
        """Return whether somebody else has a view of the memory."""
        return self._uses() > self._idle


class _Entry:
    """A unit in a buffer, or on its way there."""

    def __init__(self, buffer: _Buffer, after: Sequence[Any]) -> None:
        self.buffer = buffer
        self.after = after  # events of computations with the buffer's last contents
        self.copied: Any = None  # the event of its copy to the device
        self.pins = 0
        self.ready = False
        self.error: BaseException | None = None


class Window:
    """Buffers that hold the units in use and the next one, which a thread reads ahead.

    The order of units is learned: after a pair of units comes what came after it the last time, so
    that forward and backward passes, and loops over tokens, are all read ahead. A buffer is written
    to again only when nobody has a view of it; if somebody kept one, the buffer is his.

    Args:
        sizes: bytes of each unit, in the order of the model.
        fill: reads a unit into memory, behind the given events; runs on the thread, and returns the
            event of a copy that is still on its way, else None.
        allocate: returns that many bytes of memory.
        limit: bytes of buffers that are kept, unless units in use need more.
        ahead: units that are read ahead.
        patience: seconds without a byte after which a read counts as failed.
        describe: what a unit is, for errors.
        reading: which file is being read, for errors.
        copies: orders copies and computations, if the memory is that of an accelerator.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        fill: Callable[[int, torch.Tensor, Sequence[Any]], Any],
        allocate: Callable[[int], torch.Tensor],
        limit: int,
        *,
        ahead: int = 1,
        patience: float = 300.0,
        describe: Callable[[int], str] = str,
        reading: Callable[[], str] = lambda: "memory",
        copies: DeviceCopies | None = None,
    ) -> None:
        self._sizes = sizes
        self._fill = fill
        self._allocate = allocate
        self._limit = limit
        self._ahead = ahead
        self._patience = patience
        self._describe = describe
        self._reading = reading
        self._copies = copies
        self._changed = threading.Condition(threading.RLock())
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._orders: deque[int] = deque()  # units for the thread to read
        self._escaped: list[tuple[StorageWeakRef, int]] = []
        self._after: dict[tuple[int, int], int] = {}
        self._last: tuple[int, int] = (-2, -1)
        self._thread: threading.Thread | None = None
        self._moved = 0.0  # when the last bytes came
        self.traffic = Traffic()
        forks().add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers now."""
        with self._changed:
            return self._buffer_bytes()

    def _buffer_bytes(self) -> int:
        return sum(entry.buffer.nbytes for entry in self._entries.values())

    @property
    def escaped_nbytes(self) -> int:
        """Bytes of evicted buffers of which a view is alive."""
        with self._changed:
            self._escaped = [escape for escape in self._escaped if not escape[0].expired()]  # type: ignore[no-untyped-call]
            return sum(nbytes for _, nbytes in self._escaped)

    def progress(self, count: int) -> None:
        """Record progress of a read, so that a slow one does not count as failed."""
        self._moved = time.monotonic()
        self.traffic.bytes_read += count

    def acquire(self, unit: int) -> torch.Tensor:
        """Return the memory of a unit, and pin it until it is released.

        Raises:
            WeightReadError: it cannot be read.
        """
        with self._changed:
            entry = self._use(unit)
            entry.pins += 1
            return entry.buffer.memory

    def release(self, unit: int) -> None:
        """Unpin a unit: its memory may be reused for others."""
        with self._changed:
            self._entries[unit].pins -= 1

    def view(self, unit: int, look: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return a view of a unit's memory, which lasts as long as the view."""
        with self._changed:
            return look(self._use(unit).buffer.memory)

    def discard(self, unit: int) -> None:
        """Discard the memory of a unit, which is read again for its next use.

        Wait for a read of it that is in progress.
        """
        with self._changed:
            entry = self._entries.get(unit)
            if entry is not None and not entry.ready:
                self._wait(unit, entry)
            if entry is not None and not entry.pins:
                self._evict(unit)

    def trim(self) -> None:
        """Free all buffers that are not in use."""
        with self._changed:
            for unit in self._orders:
                self._entries.pop(unit, None)
            self._orders.clear()
            for unit, entry in list(self._entries.items()):
                if not entry.pins and entry.ready:
                    self._evict(unit)

    def close(self) -> None:
        """Stop the thread and free all buffers that are not in use; the next use restarts it."""
        with self._changed:
            self.trim()
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_TICK)
        self.trim()

    def after_fork(self) -> None:
        """Reset in the child of a fork, which has the memory but no thread."""
        self._changed = threading.Condition(threading.RLock())
        self._thread = None
        self._orders.clear()
        for unit, entry in list(self._entries.items()):
            if not entry.ready:
                del self._entries[unit]

    def _use(self, unit: int) -> _Entry:
        entry = self._entries.get(unit)
        if entry is not None and entry.error is not None:  # reading ahead failed: once more
            del self._entries[unit]
            entry = None
        if entry is None:
            self.traffic.misses += 1
            entry = self._order(unit)
        elif unit != self._last[1]:
            self.traffic.hits += 1
        self._entries.move_to_end(unit)
        entry.pins += 1  # reading ahead must not take its memory
        try:
            if not entry.ready:
                self._wait(unit, entry)
            if self._copies is not None:
                self._join(entry, self._copies)
            if unit != self._last[1]:
                self._after[self._last] = unit
                self._last = (self._last[1], unit)
            self._read_ahead()
        finally:
            entry.pins -= 1
        return entry

    def _join(self, entry: _Entry, copies: DeviceCopies) -> None:
        """Make this thread's stream wait for the copy of a unit."""
        stream = copies.current()
        if stream not in entry.buffer.streams:
            # Else the allocator reuses freed memory that this stream still reads.
            entry.buffer.memory.record_stream(stream)
            entry.buffer.streams[stream] = None
        if entry.copied is not None:
            copies.wait(entry.copied, stream)

    def _read_ahead(self) -> None:
        before, current = self._last
        for _ in range(self._ahead):
            step = -1 if before == current + 1 else 1
            # The successor in the last pass, else the next unit in the direction of the last step.
            following = self._after.get((before, current), current + step)
            if not 0 <= following < len(self._sizes):
                following = 0 if step > 0 else -1
            if following < 0 or following == current:
                return
            if following not in self._entries:
                if not self._sizes[following] or not self._has_room(self._sizes[following]):
                    return
                self._order(following)
            before, current = current, following

    def _order(self, unit: int) -> _Entry:
        """Assign a unit a buffer, and queue it for the reader thread."""
        buffer = self._buffer(self._sizes[unit])
        after: Sequence[Any] = ()
        if self._copies is not None:
            after = self._copies.marks(buffer.streams or [self._copies.current()])
        entry = self._entries[unit] = _Entry(buffer, after)
        self._orders.append(unit)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="offload-reader", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return entry

    def _has_room(self, size: int) -> bool:
        busy = [entry for entry in self._entries.values() if entry.pins or not entry.ready]
        return sum(entry.buffer.nbytes for entry in busy) + size <= self._limit

    def _buffer(self, size: int) -> _Buffer:
        """Return memory of this size, reused if an evicted buffer fits."""
        held = self._buffer_bytes()
        for unit, entry in list(self._entries.items()):
            if held + size <= self._limit:
                break
            if entry.pins or not entry.ready:
                continue
            held -= entry.buffer.nbytes
            free = self._evict(unit)
            # A small unit in a far larger buffer would take the room of others.
            if free is not None and size <= free.nbytes <= 2 * size:
                return free
        # Else it could be used in that mode, or in that transform of torch.func, only.
        with torch.inference_mode(False), torch._C._DisableFuncTorch():
            buffer = _Buffer(self._allocate(size))
        self.traffic.peak = max(self.traffic.peak, held + buffer.nbytes)
        return buffer

    def _evict(self, unit: int) -> _Buffer | None:
        """Evict a unit; return its buffer, None if a view of it is alive."""
        buffer = self._entries.pop(unit).buffer
        if not buffer.is_viewed():
            return buffer
        self.traffic.escapes += 1
        self._escaped = [escape for escape in self._escaped if not escape[0].expired()]  # type: ignore[no-untyped-call]
        storage = buffer.memory.untyped_storage()
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._escaped.append((weak, buffer.nbytes))
        return None

    def _wait(self, unit: int, entry: _Entry) -> None:
        start = self._moved = time.monotonic()
        try:
            while not entry.ready:
                self._changed.wait(_TICK)
                if entry.ready:
                    break
                if self._thread is None or not self._thread.is_alive():
                    self._abandon(
                        f"{self._describe(unit)}: the thread that reads {self._reading()} has "
                        "ended; the next use begins another one"
                    )
                elif time.monotonic() - self._moved > self._patience:
                    self._abandon(
                        f"{self._describe(unit)}: no byte has come from {self._reading()} for "
                        f"{self._patience:g} s: check the disk or the network file system"
                    )
        finally:
            self.traffic.waited += time.monotonic() - start
        if entry.error is not None:
            if self._entries.get(unit) is entry:
                del self._entries[unit]
            message = str(entry.error)
            if not isinstance(entry.error, WeightReadError):
                message = f"{type(entry.error).__name__}: {message}"
            if not message.startswith(self._describe(unit)):
                message = f"{self._describe(unit)}: {message}"
            raise WeightReadError(message) from entry.error

    def _abandon(self, why: str) -> None:
        """Fail all reads that are on their way, and give up the thread.

        The thread may still write: neither its buffers nor itself are used again.
        """
        self._thread = None
        self._orders.clear()
        for unit, entry in list(self._entries.items()):
            if not entry.ready:
                del self._entries[unit]
                entry.error, entry.ready = WeightReadError(why), True
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._orders:
                    if self._thread is not threading.current_thread():
                        return
                    self._changed.wait()
                if self._thread is not threading.current_thread():
                    return
                unit = self._orders.popleft()
                entry = self._entries.get(unit)
            if entry is None:
                continue
            copied, failed = None, None
            try:
                copied = self._fill(unit, entry.buffer.memory, entry.after)
            except BaseException as error:
                failed = error
            with self._changed:
                if self._thread is threading.current_thread():
                    self.traffic.fetches += 1
                if not entry.ready:
                    entry.copied, entry.error, entry.ready = copied, failed, True
                self._changed.notify_all()
            del entry


@functools.cache
def forks() -> weakref.WeakSet[Any]:
    """Return the objects whose ``after_fork`` the child of a fork calls."""
    objects: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin_anew() -> None:
        for owner in list(objects):
            owner.after_fork()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=begin_anew)
    return objects
