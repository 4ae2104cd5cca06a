"""The memory through which offloaded units pass: a few buffers, and a thread that reads ahead."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel_callbacks.offload.source import WeightReadError

__all__ = ["Traffic", "Window"]

_TICK = 0.5  # seconds between looks at a read that takes long


@dataclass
class Traffic:
    """What has passed through a window, in bytes, counts and seconds.

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
        self._idle = self._uses()

    def _uses(self) -> int:
        # Autograd's saved tensors count too, which Python's reference counts do not show.
        count: int = torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata)
        return count

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def is_viewed(self) -> bool:
        """Return whether somebody else has a view of the memory."""
        return self._uses() > self._idle


class _Entry:
    """A unit in a buffer, or on its way there."""

    def __init__(self, buffer: _Buffer) -> None:
        self.buffer = buffer
        self.pins = 0
        self.ready = False
        self.error: BaseException | None = None


class Window:
    """Buffers that hold the units in use and the next one, which a thread reads ahead.

    The order of units is learnt: after a pair of units comes what came after it the last time, so
    that forward and backward passes, and loops over tokens, are all read ahead. A buffer is written
    to again only when nobody has a view of it; if somebody kept one, the buffer is his.

    Args:
        sizes: bytes of each unit, in the order of the model.
        fill: reads a unit into memory and returns the number of bytes read; runs on the thread.
        allocate: returns that many bytes of memory.
        limit: bytes of buffers that are kept, unless units in use need more.
        ahead: units that are read ahead.
        patience: seconds without a byte after which a read counts as failed.
        describe: what a unit is, and where, for errors.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.window import Window
        >>> def fill(unit, memory):
        ...     memory.fill_(unit)
        ...     return memory.numel()
        >>> window = Window([2, 2], fill, lambda n: torch.zeros(n, dtype=torch.uint8), limit=4)
        >>> window.acquire(1).tolist()
        [1, 1]
        >>> window.release(1)
        >>> window.close()
    """

    def __init__(
        self,
        sizes: Sequence[int],
        fill: Callable[[int, torch.Tensor], int],
        allocate: Callable[[int], torch.Tensor],
        limit: int,
        *,
        ahead: int = 1,
        patience: float = 300.0,
        describe: Callable[[int], str] = str,
    ) -> None:
        self._sizes = sizes
        self._fill = fill
        self._allocate = allocate
        self._limit = limit
        self._ahead = ahead
        self._patience = patience
        self._describe = describe
        self._changed = threading.Condition(threading.RLock())
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._free: list[_Buffer] = []
        self._orders: deque[int] = deque()  # units for the thread to read
        self._after: dict[tuple[int, int], int] = {}
        self._last: tuple[int, int] = (-2, -1)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closed = False
        self._moved = 0.0  # when the last bytes came
        self.traffic = Traffic()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers now."""
        with self._changed:
            held = sum(entry.buffer.nbytes for entry in self._entries.values())
            return held + sum(buffer.nbytes for buffer in self._free)

    def progress(self, count: int) -> None:
        """Note that bytes have come: slow reads do not count as failed."""
        self._moved = time.monotonic()
        self.traffic.bytes_read += count

    def acquire(self, unit: int) -> torch.Tensor:
        """Return the memory of a unit, and keep it there until it is released.

        Raises:
            WeightReadError: it cannot be read.
        """
        with self._changed:
            entry = self._used(unit)
            entry.pins += 1
            return entry.buffer.memory

    def release(self, unit: int) -> None:
        """Let go of a unit: its memory may be used for others."""
        with self._changed:
            self._entries[unit].pins -= 1

    def view(self, unit: int, look: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return a view of a unit's memory, which lasts as long as the view."""
        with self._changed:
            return look(self._used(unit).buffer.memory)

    def discard(self, unit: int) -> None:
        """Forget what the memory of a unit holds, which is read again for the next use."""
        with self._changed:
            entry = self._entries.get(unit)
            if entry is not None and not entry.pins:
                del self._entries[unit]

    def trim(self) -> None:
        """Free all buffers that are not in use."""
        with self._changed:
            self._orders.clear()
            for unit, entry in list(self._entries.items()):
                if not entry.pins and entry.ready:
                    del self._entries[unit]
            self._free.clear()

    def close(self) -> None:
        """End the thread and free all buffers that are not in use."""
        with self._changed:
            self._closed = True
            self._orders.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_TICK)
        self.trim()

    def _used(self, unit: int) -> _Entry:
        entry = self._entries.get(unit)
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
            if unit != self._last[1]:
                self._after[self._last] = unit
                self._last = (self._last[1], unit)
            self._read_ahead()
        finally:
            entry.pins -= 1
        return entry

    def _read_ahead(self) -> None:
        before, now = self._last
        for _ in range(self._ahead):
            step = -1 if before == now + 1 else 1
            following = self._after.get((before, now), now + step)
            if not 0 <= following < len(self._sizes):
                following = 0 if step > 0 else -1
            if following < 0 or following == now:
                return
            if following not in self._entries:
                if not self._has_room(self._sizes[following]):
                    return
                self._order(following)
            before, now = now, following

    def _order(self, unit: int) -> _Entry:
        """Give a unit a buffer, and let the thread read it."""
        entry = self._entries[unit] = _Entry(self._buffer(self._sizes[unit]))
        self._orders.append(unit)
        self._start()
        self._changed.notify_all()
        return entry

    def _has_room(self, size: int) -> bool:
        kept = [one for one in self._entries.values() if one.pins or not one.ready]
        return sum(one.buffer.nbytes for one in kept) + size <= self._limit

    def _buffer(self, size: int) -> _Buffer:
        """Return memory of this size: used before if that fits, else new."""
        for buffer in sorted(self._free, key=lambda one: one.nbytes):
            if size <= buffer.nbytes <= 2 * size and not buffer.is_viewed():
                self._free.remove(buffer)
                return buffer
        held = self.nbytes
        for unit, entry in list(self._entries.items()):
            if held + size <= self._limit:
                break
            if entry.pins or not entry.ready:
                continue
            del self._entries[unit]
            if entry.buffer.is_viewed():
                self.traffic.escapes += 1
                held -= entry.buffer.nbytes
            elif size <= entry.buffer.nbytes <= 2 * size:
                return entry.buffer
            else:
                held -= entry.buffer.nbytes
        while self._free and held + size > self._limit:
            held -= self._free.pop().nbytes
        with torch.inference_mode(False):  # the same buffers serve a training step later
            made = _Buffer(self._allocate(size))
        self.traffic.peak = max(self.traffic.peak, held + made.nbytes)
        return made

    def _wait(self, unit: int, entry: _Entry) -> None:
        start = self._moved = time.monotonic()
        try:
            while not entry.ready:
                self._changed.wait(_TICK)
                if entry.ready:
                    break
                if self._thread is None or not self._thread.is_alive():
                    raise WeightReadError(
                        f"the thread that reads {self._describe(unit)} has ended without it"
                    )
                if time.monotonic() - self._moved > self._patience:
                    raise WeightReadError(
                        f"no byte came in {self._patience:g} s while reading "
                        f"{self._describe(unit)}: check the disk or the network file system"
                    )
        except WeightReadError:
            # The thread may still write there: neither the buffer nor the thread is used again.
            self._entries.pop(unit, None)
            self._thread = None
            self._orders.clear()
            raise
        finally:
            self.traffic.waited += time.monotonic() - start
        if entry.error is not None:
            self._entries.pop(unit, None)
            raise entry.error

    def _start(self) -> None:
        if self._process != os.getpid():  # a fork has the memory and no thread
            self._thread, self._process = None, os.getpid()
        if self._thread is None or not self._thread.is_alive():
            self._closed = False
            self._thread = threading.Thread(target=self._work, name="offload-reader", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._orders or self._thread is not threading.current_thread():
                    if self._closed or self._thread is not threading.current_thread():
                        return
                    self._changed.wait()
                unit = self._orders.popleft()
                entry: Any = self._entries.get(unit)
            if entry is None or entry.ready:
                continue
            try:
                self._fill(unit, entry.buffer.memory)
            except BaseException as error:
                entry.error = error
            with self._changed:
                self.traffic.fetches += 1
                entry.ready = True
                self._changed.notify_all()
