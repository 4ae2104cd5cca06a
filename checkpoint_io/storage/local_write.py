"""Write local files: direct IO through a ring of buffers, fsync, and advice on an OSError."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import AbstractContextManager
from queue import SimpleQueue

from checkpoint_io.local_files import advised
from checkpoint_io.storage.buffers import BufferPool, copy_into
from checkpoint_io.threads import Worker, start_worker

SMALL_FILE = 4 * 2**20  # below that, a thread and a buffer cost more than they gain
RING = 3  # buffers per file: one being filled, one being written, one ready
# of memory, offset and length; a filesystem that requires more gets buffered IO
ALIGNMENT = 4096
_GATHER = 2**20
NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_ROOM = "make room, or save to another location"
_PERMISSIONS = "check its owner and mode, or save to another location"
_ADVICE = {
    errno.ENOSPC: f"the disk is full: {_ROOM}",
    errno.EDQUOT: f"the quota is used up: {_ROOM}",
    errno.EFBIG: "the limit on file sizes is exceeded (see ulimit -f): save with a smaller "
    "max_shard_size, or raise the limit",
    errno.EROFS: "the filesystem is mounted read-only: save to another location",
    errno.EACCES: f"permission is missing: {_PERMISSIONS}",
    errno.EPERM: f"permission is missing: {_PERMISSIONS}",
    errno.EIO: "the device failed: see the kernel's log, and save to another location",
    errno.ENOENT: "the folder is gone, another process has removed it: save again, to a folder "
    "that nothing else removes",
    errno.ESTALE: "the network filesystem lost it: mount it again, then save again",
    errno.ENOTDIR: "a file exists where a folder is needed: remove it, or save to another location",
    errno.EEXIST: "one of that name exists already and is not overwritten: remove it, or save to "
    "another location",
}


def open_output(
    descriptor: int, path: str, size: int | None, pool: BufferPool
) -> PlainOutput | RingOutput:
    """Return the writer for a file of `size` bytes (None if not known)."""
    first = None if size is not None and size < SMALL_FILE else pool.take()
    if first is None:
        return PlainOutput(descriptor, path)
    try:
        return RingOutput(descriptor, path, pool, first)
    except BaseException:
        pool.give([first])
        raise


class PlainOutput:
    """A writer through the page cache that joins small pieces."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path
        self._gathered = bytearray()

    def write(self, data: memoryview[int]) -> None:
        """Gather small pieces; write large ones at once."""
        view = as_bytes(data)
        if len(view) + len(self._gathered) <= _GATHER:
            self._gathered += view
            return
        self.finish()
        self._flush(view)

    def finish(self) -> None:
        """Write what was gathered."""
        gathered, self._gathered = self._gathered, bytearray()
        self._flush(memoryview(gathered))

    def _flush(self, view: memoryview[int]) -> None:
        """Pass bytes to the kernel."""
        with explained(self._path):
            write_all(self._descriptor, view)

    def close(self) -> None:
        """Do nothing: no thread runs here."""


class RingOutput:
    """A writer that fills one buffer while a thread writes another."""

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
        # A copy that stays open until the thread ends: if the caller's descriptor were closed
        # first, its number could be reused, and the thread would write into another file.
        self._descriptor = os.dup(descriptor)
        self._file = DirectOutput(self._descriptor)

    def write(self, data: memoryview[int]) -> None:
        """Copy bytes into the ring; wait while all its buffers are being written."""
        view = as_bytes(data)
        while view:
            if self._filled == len(self._current):
                self._submit()
            piece = view[: len(self._current) - self._filled]
            copy_into(self._current[self._filled : self._filled + len(piece)], piece)
            self._filled += len(piece)
            view = view[len(piece) :]

    def _submit(self) -> None:
        """Submit the full buffer to the thread and continue with another."""
        self._raise_error()
        self._thread = self._thread or start_worker(self._run)
        if self._thread is None:  # no thread can be started: write here
            self._write(self._current, self._filled)
            self._raise_error()
        else:
            self._full.put((self._current, self._filled))
            self._current = self._grow() or self._written.get()
        self._filled = 0

    def _grow(self) -> memoryview[int] | None:
        """Return a new buffer if no written one is free and the ring may still grow."""
        grows = self._written.empty() and len(self._owned) < RING
        more = self._pool.take() if grows else None
        if more is not None:
            self._owned.append(more)
        return more

    def _run(self) -> None:
        """Write submitted buffers until the sentinel (the body of the thread)."""
        try:
            for buffer, filled in iter(self._full.get, None):
                self._write(buffer, filled)
                self._written.put(buffer)  # after an error too, or `_submit` would block forever
        finally:
            self._release()

    def _write(self, buffer: memoryview[int], filled: int) -> None:
        """Write one buffer and keep the first error; write nothing after one."""
        if self._error is not None or self._stopped:
            return
        try:
            self._file.write(buffer[:filled])
        except BaseException as error:
            self._error = error

    def _raise_error(self) -> None:
        """Raise the first error of a write."""
        if self._error is not None:
            with explained(self._path):
                raise self._error

    def finish(self) -> None:
        """Write the rest and wait until the kernel has all of it."""
        if self._thread is None:
            self._write(self._current, self._filled)
        else:
            self._full.put((self._current, self._filled))
        self._end()
        self._raise_error()

    def close(self) -> None:
        """Stop; discard what is still in the ring."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        """End the thread; without one, release here."""
        if self._thread is None:
            self._release()
        else:
            self._full.put(None)
            self._thread.wait()

    def _release(self) -> None:
        """Close the descriptor and return the buffers to the pool, once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._pool.give(self._owned)


class DirectOutput:
    """Appends aligned buffers to a file with direct IO, and the unaligned rest without it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.direct = switch_direct(descriptor, True)

    def write(self, data: memoryview[int]) -> None:
        """Append bytes whose memory is page-aligned."""
        done = self._write_direct(data[: len(data) // ALIGNMENT * ALIGNMENT]) if self.direct else 0
        if done < len(data):
            self.stop_direct()  # from here on the file offset is not aligned
            write_all(self._descriptor, data[done:])

    def _write_direct(self, data: memoryview[int]) -> int:
        """Write as much as direct IO accepts; return the number of bytes."""
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, data[done:])
            except OSError as error:
                # Some filesystems accept O_DIRECT and refuse the first write; every filesystem
                # refuses a write that continues after a short one, off a block boundary.
                if error.errno in NOT_DIRECT:
                    break
                raise
        return done

    def stop_direct(self) -> None:
        """Continue through the page cache."""
        if self.direct:
            self.direct = False
            switch_direct(self._descriptor, False)


def switch_direct(descriptor: int, on: bool) -> bool:
    """Turn direct IO on or off; return False if this system or filesystem has none."""
    # set on the open file: open(O_CREAT | O_DIRECT) leaves an empty file behind where it fails
    flag = getattr(os, "O_DIRECT", 0)
    if not flag or sys.platform == "win32":
        return False
    import fcntl

    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError:
        return False
    return True


def write_all(descriptor: int, data: memoryview[int]) -> None:
    """Write every byte; a single os.write may write fewer."""
    while data:
        data = data[os.write(descriptor, data) :]


def as_bytes(data: memoryview[int]) -> memoryview[int]:
    """Return a view of a buffer of any item type as bytes."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def explained(path: str) -> AbstractContextManager[None]:
    """Add advice to an OSError raised in the block."""
    return advised(path, _ADVICE)
