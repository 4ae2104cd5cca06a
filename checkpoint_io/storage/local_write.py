"""Direct IO through a ring of buffers; fsync; what to do about an OSError."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Protocol

from checkpoint_io.storage.buffers import BufferPool, copy_into
from checkpoint_io.threads import Worker, started

_ROOM = "make room, or save to another place"
_RIGHTS = "look at its owner and mode, or save to another place"
_ADVICE = {
    errno.ENOSPC: f"the disk is full: {_ROOM}",
    errno.EDQUOT: f"the quota is used up: {_ROOM}",
    errno.EFBIG: "a file may not be that large there (see ulimit -f): save with a smaller "
    "max_shard_size, or raise the limit",
    errno.EROFS: "the filesystem is mounted read-only: save to another place",
    errno.EACCES: f"no right to do that there: {_RIGHTS}",
    errno.EPERM: f"no right to do that there: {_RIGHTS}",
    errno.EIO: "the device failed: see the kernel's log, and save to another place",
    errno.ENOENT: "the folder is gone, removed by somebody meanwhile: save again, to a place "
    "that is left alone",
    errno.ESTALE: "the network filesystem lost it: mount it again, then save again",
    errno.ENOTDIR: "a file is where a folder has to be: remove it, or save to another place",
    errno.EEXIST: "there is one of that name already, which is not overwritten: remove it, or "
    "save to another place",
}
ALIGNMENT = 4096  # of memory, place and length; a filesystem that asks for more gets buffered IO
_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
RING = 3  # buffers a file: one being filled, one being written, one ready
SMALL_FILE = 4 * 2**20
_GATHER = 2**20


def advised(error: OSError, path: str) -> OSError:
    """Return the same kind of error with the path and what to do; the same object if it has both.

    Raise it `from` the one given.
    """
    advice = _ADVICE.get(error.errno or 0)
    if advice is None or advice in str(error):
        return error
    said = error.strerror or os.strerror(error.errno or 0)
    # the number picks the class: PermissionError, FileNotFoundError, ...
    return OSError(error.errno, f"{said} ({advice})", error.filename or path)


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Add advice to an error of the filesystem in the block."""
    try:
        yield
    except OSError as error:
        better = advised(error, path)
        if better is error:
            raise
        raise better from error


def write_all(descriptor: int, data: memoryview[int]) -> None:
    """Write every byte; the kernel may take fewer than asked."""
    while data:
        data = data[os.write(descriptor, data) :]


def _switch_direct(descriptor: int, on: bool) -> bool:
    """Turn direct IO on or off; False if this system or filesystem has none.

    Set on the open file and not by open(), which leaves a new file behind where it refuses.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    import fcntl

    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError:
        return False
    return True


class DirectOutput:
    """Appends aligned buffers to a file with direct IO, and what does not fit that without it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.direct = _switch_direct(descriptor, True)

    def write(self, data: memoryview[int]) -> None:
        """Append bytes that start at a page of memory."""
        done = self._write_direct(data[: len(data) // ALIGNMENT * ALIGNMENT]) if self.direct else 0
        if done < len(data):
            self.stop_direct()  # from here on the place in the file is not aligned
            write_all(self._descriptor, data[done:])

    def _write_direct(self, data: memoryview[int]) -> int:
        """Write as much as goes directly; return how much that was."""
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, data[done:])
            except OSError as error:
                # some filesystems say so only now, and all after a write that ended off a block
                if error.errno in _REFUSALS:
                    break
                raise
        return done

    def stop_direct(self) -> None:
        """Go on through the page cache."""
        if self.direct:
            self.direct = False
            _switch_direct(self._descriptor, False)


def make_folders(path: str) -> None:
    """Create a folder and its parents, and sync each parent that gained an entry."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        parent = os.path.dirname(path)
        if parent == path:
            break
        path = parent
    for folder in reversed(missing):
        os.makedirs(folder, exist_ok=True)  # another rank may have been faster
        sync_folder(os.path.dirname(folder))


def sync_file(descriptor: int) -> None:
    """Ask the disk itself, not just the kernel, to keep the file."""
    try:
        import fcntl

        full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone stops at the drive cache
    except ImportError:
        full = None
    if full is not None:
        with suppress(OSError):
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def sync_folder(path: str) -> None:
    """Make names created in or removed from a folder durable, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network filesystems have no fsync for folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(descriptor)


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
