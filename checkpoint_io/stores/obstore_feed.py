"""Parts of an upload on their way from the thread that writes to the one in which obstore sends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from checkpoint_io.storage.s3.parts import PartBudget, process_budget


class Feed:
    """An iterable of parts that is written to; obstore sends them from where they are."""

    def __init__(self, part_size: int) -> None:
        self.part_size = part_size
        self.written = 0
        self._budget = process_budget()
        self._budget.enter()
        self._tickets: list[_Ticket] = []
        self._buffer: bytearray | None = None
        self._filled = 0
        self._changed = threading.Condition()
        self._waiting: Any = None  # a part to be taken
        self._ended = False
        self._cause: BaseException | None = None
        self._failure: BaseException | None = None
        self._done = False

    def run(self, put: Callable[[], None]) -> None:
        """Run the upload and keep its error for the writer."""
        try:
            put()
        except BaseException as error:
            self._failure = error
        with self._changed:
            self._done, self._waiting = True, None
            self._changed.notify_all()

    def write(self, data: memoryview[int]) -> None:
        """Copy bytes; a full part is handed over, which waits until there is room."""
        source = np.frombuffer(data, dtype=np.uint8)
        at = 0
        while at < len(source):
            if self._buffer is None:
                self._buffer = self._budget.buffer(self.part_size)
            count = min(self.part_size - self._filled, len(source) - at)
            target = np.frombuffer(self._buffer, dtype=np.uint8)
            # numpy copies without holding the interpreter
            target[self._filled : self._filled + count] = source[at : at + count]
            at += count
            self._filled += count
            if self._filled == self.part_size:
                self._hand()
        self.written += len(source)

    def _hand(self) -> None:
        """Hand the part over, once there is room among all uploads and in this one."""
        assert self._buffer is not None
        self.raise_failure()
        buffer, length = self._buffer, self._filled
        self._buffer, self._filled = None, 0
        self._budget.acquire(length)
        ticket = _Ticket(self._budget, buffer, length)
        self._tickets.append(ticket)
        part = np.frombuffer(buffer, dtype=np.uint8)[:length]
        # obstore lets go of a part when it has arrived
        weakref.finalize(part, ticket.arrived).atexit = False
        with self._changed:
            while self._waiting is not None and not self._done:
                self._changed.wait()
            if not self._done:
                self._waiting = part
            self._changed.notify_all()
        self.raise_failure()

    def end(self, cause: BaseException | None) -> None:
        """Hand over the rest and end, or make the upload fail for a cause."""
        if cause is None and self._filled:
            self._hand()
        with self._changed:
            self._cause = cause
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Give back what the upload held, also what an error still refers to."""
        for ticket in self._tickets:
            ticket.leave()
        self._buffer = None
        self._budget.leave()

    def raise_failure(self) -> None:
        """Raise what the upload met."""
        if self._failure is not None:
            raise self._failure

    def __iter__(self) -> Iterator[Any]:
        """Yield the parts as they come."""
        while True:
            with self._changed:
                while self._waiting is None and not self._ended:
                    self._changed.wait()
                if self._cause is not None:
                    raise RuntimeError("the writer gave up") from self._cause
                part, self._waiting = self._waiting, None
                self._changed.notify_all()
            if part is None:
                return
            yield part
            part = None  # or this frame would keep it


class _Ticket:
    """The place that one part has in the budget."""

    def __init__(self, budget: PartBudget, buffer: bytearray, length: int) -> None:
        self._budget = budget
        self._buffer = buffer
        self._length = length
        self._left = False

    def arrived(self) -> None:
        """Leave the budget, and let another part use the memory."""
        if not self._left:
            self._budget.keep(self._buffer)
        self.leave()

    def leave(self) -> None:
        """Leave the budget, once."""
        if not self._left:
            self._left = True
            self._budget.release(self._length)
