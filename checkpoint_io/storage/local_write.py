"""Files written by a thread out of a ring of buffers, so that hashing, copying and disk overlap."""

from __future__ import annotations

import os
from queue import SimpleQueue
from typing import Protocol

from checkpoint_io.storage.buffers import BufferPool, copy_into
from checkpoint_io.stores.advice import explained
from checkpoint_io.stores.direct import DirectOutput, write_all
from checkpoint_io.workers import Worker, started

RING = 3  # buffers a file: one being filled, one being written, one ready
SMALL_FILE = 4 * 2**20
_GATHER = 2**20


class Output(Protocol):
    """Takes the bytes of one file."""

    def write(self, data: memoryview[int]) -> None:
        """Take some bytes, copied before this returns; raises what went wrong so far."""

    def finish(self) -> None:
        """Hand the last byte to the kernel."""

    def close(self) -> None:
        """Stop, whatever state this is in; nothing touches the descriptor afterwards."""


def open_output(descriptor: int, path: str, size: int | None, pool: BufferPool) -> Output:
    """Choose how to write a file; `size` is None where it is not known."""
    first = None if size is not None and size < SMALL_FILE else pool.take()
    if first is None:
        return PlainOutput(descriptor, path)
    try:
        return RingOutput(descriptor, path, pool, first)
    except BaseException:
        pool.give([first])
        raise


def as_bytes(data: memoryview[int]) -> memoryview[int]:
    """View a buffer of any items as its bytes."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


class PlainOutput:
    """Writes through the page cache, small pieces together."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path
        self._gathered = bytearray()

    def write(self, data: memoryview[int]) -> None:
        """Take some bytes."""
        view = as_bytes(data)
        if len(view) + len(self._gathered) <= _GATHER:
            self._gathered += view
            return
        self.finish()
        self._pass_on(view)

    def finish(self) -> None:
        """Write what was gathered."""
        gathered, self._gathered = self._gathered, bytearray()
        self._pass_on(memoryview(gathered))

    def _pass_on(self, view: memoryview[int]) -> None:
        """Write, and explain an error."""
        with explained(self._path):
            write_all(self._descriptor, view)

    def close(self) -> None:
        """Nothing runs here."""


class RingOutput:
    """Fills one buffer while a thread writes another."""

    def __init__(
        self, descriptor: int, path: str, pool: BufferPool, first: memoryview[int]
    ) -> None:
        self._path = path
        self._pool = pool
        self._owned = [first]
        self._current = first
        self._filled = 0
        self._full: SimpleQueue[tuple[memoryview[int], int] | None] = SimpleQueue()
        self._written: SimpleQueue[memoryview[int]] = SimpleQueue()
        self._thread: Worker | None = None
        self._error: BaseException | None = None
        self._stopped = False
        # its own, open until the thread ends: a number that somebody else got must not be written
        self._descriptor = os.dup(descriptor)
        self._file = DirectOutput(self._descriptor)

    def write(self, data: memoryview[int]) -> None:
        """Copy bytes into the ring; waits while all its buffers are being written."""
        view = as_bytes(data)
        while view:
            if self._filled == len(self._current):
                self._pass_on()
            piece = view[: len(self._current) - self._filled]
            copy_into(self._current[self._filled : self._filled + len(piece)], piece)
            self._filled += len(piece)
            view = view[len(piece) :]

    def _pass_on(self) -> None:
        """Have the full buffer written and go on with another."""
        self._raise_error()
        self._thread = self._thread or started(self._write_all)
        if self._thread is None:
            self._write(self._current, self._filled)
            self._raise_error()
        else:
            self._full.put((self._current, self._filled))
            self._current = self._one_more() or self._written.get()
        self._filled = 0

    def _one_more(self) -> memoryview[int] | None:
        """Return a new buffer if none is written yet and the ring may still grow."""
        grows = self._written.empty() and len(self._owned) < RING
        more = self._pool.take() if grows else None
        if more is not None:
            self._owned.append(more)
        return more

    def _write_all(self) -> None:
        """Write what comes until told to end; runs in the thread."""
        try:
            for buffer, filled in iter(self._full.get, None):
                self._write(buffer, filled)
                self._written.put(buffer)  # after an error as well: nobody may wait for ever
        finally:
            self._release()

    def _write(self, buffer: memoryview[int], filled: int) -> None:
        """Write one buffer and keep the first error; nothing is written after one."""
        if self._error is not None or self._stopped:
            return
        try:
            self._file.write(buffer[:filled])
        except BaseException as error:
            self._error = error

    def _raise_error(self) -> None:
        """Raise what went wrong while writing."""
        if self._error is not None:
            with explained(self._path):
                raise self._error

    def finish(self) -> None:
        """Write the rest and wait until the kernel has everything."""
        if self._thread is None:
            self._write(self._current, self._filled)
        else:
            self._full.put((self._current, self._filled))
        self._end()
        self._raise_error()

    def close(self) -> None:
        """Stop without writing what is still in the ring."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        """End the thread, or what it would have done at its end."""
        if self._thread is None:
            self._release()
        else:
            self._full.put(None)
            self._thread.wait()

    def _release(self) -> None:
        """Close the descriptor and give the buffers back, once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._pool.give(self._owned)
