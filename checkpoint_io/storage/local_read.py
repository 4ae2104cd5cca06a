"""Read files of a local folder by byte ranges, one or several at a time."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.storage.base import Deliver, Span, missing_error, truncated_error
from checkpoint_io.storage.buffers import aligned, copy_into
from checkpoint_io.storage.local_write import ALIGNMENT, NOT_DIRECT, switch_direct
from checkpoint_io.threads import for_each

# a folder may be hostile. O_NONBLOCK: opening a planted FIFO must not hang
_READ = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
THREADS = 4
_SINGLE_THREAD = 8 * 2**20  # up to that, reading ends before a second thread has started
_DIRECT_FROM = 2**20  # bytes of a span; below that, direct IO gains nothing


class Scratch:
    """Memory for reads, reused and grown as needed."""

    def __init__(self) -> None:
        self._memory: memoryview[int] = memoryview(b"")

    def view(self, length: int) -> memoryview[int]:
        """Return that many bytes of memory; earlier content is lost."""
        if len(self._memory) < length:
            self._memory = aligned(length)
        return self._memory[:length]


class LocalReader:
    """Ranged reads of one open file."""

    def __init__(self, file: io.FileIO, path: str, size: int, scratch: Scratch) -> None:
        self._file = file
        self._path = path
        self._scratch = scratch
        self.size = size

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._file.fileno()

    def read(self, begin: int, end: int) -> memoryview[int]:
        """Return exactly these bytes; the view is valid until the next call."""
        view = self._scratch.view(end - begin)
        self._file.seek(begin)
        filled = 0
        while filled < len(view):
            count = self._file.readinto(view[filled:])
            if not count:
                raise self._shrunk(begin + filled, end)
            filled += count
        return view

    def read_into(self, begin: int, views: Sequence[memoryview[int]]) -> None:
        """Fill views with the bytes from `begin` on, one after the other.

        Bytes that nobody has read lately come past the page cache, where the system can.
        """
        if sys.platform == "win32":
            raise NotImplementedError("Windows reads into one place at a time: see can_read_into")
        length = sum(map(len, views))
        if length >= _DIRECT_FROM and self._first_reader(begin) and self._read_direct(begin, views):
            return
        position, left = begin, list(views)
        while left:
            count = os.preadv(self._file.fileno(), left, position)
            if not count:
                raise self._shrunk(position, begin + length)
            position += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def _first_reader(self, begin: int) -> bool:
        """Return whether a page is not cached, and cache that one page."""
        # To fill the page cache takes longer than to read a fast disk, and is for nothing if this
        # is the only reader. The page is a mark: the next one, another rank or the same program
        # started again, finds it and fills the cache for those who come after it.
        if sys.platform in ("win32", "darwin") or not hasattr(os, "RWF_NOWAIT"):
            return False
        page = begin // ALIGNMENT * ALIGNMENT
        try:
            os.preadv(self._file.fileno(), [bytearray(1)], page, os.RWF_NOWAIT)
        except BlockingIOError:
            os.posix_fadvise(self._file.fileno(), page, ALIGNMENT, os.POSIX_FADV_WILLNEED)
            return True
        except OSError:  # this filesystem does not tell
            pass
        return False

    def _read_direct(self, begin: int, views: Sequence[memoryview[int]]) -> bool:
        """Fill views by direct IO; return False if there is none, or a read was short."""
        if sys.platform == "win32":
            return False
        descriptor = self._file.fileno()
        end = begin + sum(map(len, views))
        first = begin // ALIGNMENT * ALIGNMENT
        view = self._scratch.view(-(-end // ALIGNMENT) * ALIGNMENT - first)
        if not switch_direct(descriptor, True):
            return False
        try:
            if os.preadv(descriptor, [view], first) < end - first:
                return False
        except OSError as error:
            if error.errno in NOT_DIRECT:
                return False
            raise
        finally:
            switch_direct(descriptor, False)
        position = begin - first
        for target in views:
            copy_into(target, view[position : position + len(target)])
            position += len(target)
        return True

    def _shrunk(self, size: int, wanted: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._path}: truncated, ends at byte {size} of {wanted}")


@contextmanager
def open_regular(path: str, scratch: Scratch | None = None) -> Iterator[LocalReader]:
    """Open a regular file for reading; refuse links and devices."""
    try:
        if not hasattr(os, "O_NOFOLLOW") and stat.S_ISLNK(os.lstat(path).st_mode):  # Windows
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        descriptor = os.open(path, _READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptCheckpointError(
                f"{path} is a symbolic link, which is not followed; put the file itself there"
            ) from None
        raise
    # fstat of the open file: a check by name could be tricked by a rename in between
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CorruptCheckpointError(f"{path} is not a regular file")
    with io.FileIO(descriptor, "r") as file:
        yield LocalReader(file, path, status.st_size, scratch or Scratch())


def forget_pages(path: str) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    if sys.platform in ("win32", "darwin") or not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError):  # some filesystems refuse the advice; then the cache is read again
        descriptor = os.open(path, _READ)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def can_read_into() -> bool:
    """Return whether this system reads into several places of memory at once."""
    return hasattr(os, "preadv")


def fetch(folder: str, spans: Sequence[Span], deliver: Deliver) -> None:
    """Read spans and pass each to `deliver`, see `Store.fetch`."""
    _use_each(folder, spans, lambda index, files: deliver(index, files.read(spans[index])))


def fetch_into(
    folder: str,
    spans: Sequence[Span],
    views: Sequence[Sequence[memoryview[int]]],
    filled: Callable[[int], None],
) -> None:
    """Read each span into its views, without a buffer in between; then call `filled(index)`."""

    def use(index: int, files: _SpanReader) -> None:
        files.read_into(spans[index], views[index])
        filled(index)

    _use_each(folder, spans, use)


def _use_each(folder: str, spans: Sequence[Span], use: Callable[[int, _SpanReader], None]) -> None:
    """Use every span, on several threads if they are long, each with a reader of its own."""
    of_thread = threading.local()
    with ExitStack() as readers:

        def use_one(index: int) -> None:
            if not hasattr(of_thread, "reader"):
                of_thread.reader = readers.enter_context(_SpanReader(folder))
            use(index, of_thread.reader)

        total = sum(span.end - span.begin for span in spans)
        for_each(use_one, range(len(spans)), THREADS if total > _SINGLE_THREAD else 1)


class _SpanReader:
    """Reads spans and keeps only the file of the last one open, to use few descriptors."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._scratch = Scratch()
        self._open = ExitStack()
        self._name: str | None = None

    def __enter__(self) -> _SpanReader:
        return self

    def __exit__(self, *details: object) -> None:
        self._open.close()

    def read(self, span: Span) -> memoryview[int]:
        """Return the bytes of a span, valid until the next call."""
        return self._open_file(span).read(span.begin, span.end)

    def read_into(self, span: Span, views: Sequence[memoryview[int]]) -> None:
        """Fill views, as long as the span, with its bytes."""
        self._open_file(span).read_into(span.begin, views)

    def _open_file(self, span: Span) -> LocalReader:
        """Return a reader of the file of a span, which is long enough."""
        path = os.path.join(self._folder, span.name)
        if span.name != self._name:
            self._open.close()
            self._name = None
            try:
                self._reader = self._open.enter_context(open_regular(path, self._scratch))
            except FileNotFoundError:
                raise missing_error(path) from None
            self._name = span.name
        if span.end > self._reader.size:
            raise truncated_error(path, span.end)
        return self._reader
