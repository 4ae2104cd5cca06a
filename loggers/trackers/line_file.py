"""Append-only files of lines, on a local disk or as an object in a store."""

from __future__ import annotations

import os
import posixpath
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from checkpoint_io.local_files import (
    advised,
    base_name,
    local_path,
    remove,
    replace,
    sync_file,
    sync_folder,
)

__all__ = [
    "PRIVATE",
    "LineFile",
    "filesystem",
    "list_names",
    "open_lines",
    "reaching",
    "read_lines",
    "read_object",
    "write_object",
]

UPLOAD_EVERY_S = 30.0
PRIVATE, _SHARED = 0o600, 0o644  # modes of new files, of which the umask takes away
_FULL = 65536  # pending bytes that are written without a flush; a hub flushes twice a second anyway
_MOST_HELD = 1 << 24  # pending bytes that wait while a disk is full
_UPLOAD_SHARE = 10  # slow uploads are made less often: they take at most a tenth of the time


def open_lines(
    logging_dir: str, filename: str, every_s: float | None = None, *, private: bool = False
) -> LineFile:
    """Open ``filename`` in a folder that is a path or an fsspec URL; create both if needed.

    Args:
        logging_dir: the folder.
        filename: name of the file.
        every_s: seconds between uploads to a store; ``UPLOAD_EVERY_S`` if None.
        private: create it for its user alone, because it holds a config.
    """
    folder = local_path(logging_dir)
    if folder is None:
        url = f"{logging_dir.rstrip('/')}/{filename}"
        return RemoteLines(url, UPLOAD_EVERY_S if every_s is None else every_s)
    return LocalLines(os.path.join(folder, filename), PRIVATE if private else _SHARED)


def read_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Iterate over the lines of a file, given by path or URL.

    Raises:
        FileNotFoundError: there is no such file.
    """
    name = os.fspath(path)
    local = local_path(name)
    if local is None:
        yield from read_object(name).splitlines(keepends=True)
        return
    with open(local, "rb") as file:
        yield from file


class LineFile(ABC):
    """Lines of bytes, each with its newline; what was added reaches the file in `flush`."""

    path: str

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def pending(self) -> int:
        """The number of bytes that were added and not written."""
        return len(self._pending)

    @property
    def is_dirty(self) -> bool:
        """True while something that was added is not in the file."""
        return bool(self._pending)

    def add(self, lines: bytes) -> None:
        """Queue complete lines."""
        self._pending += lines

    def make_room(self) -> None:
        """Write what is pending if it is much; after an error it waits in memory.

        Raises:
            OSError: the write failed, and as much is pending as may wait.
        """
        if self.pending < _FULL:
            return
        try:
            self.flush()
        except OSError:
            if self.pending > _MOST_HELD:
                raise

    @abstractmethod
    def lines(self) -> Iterator[bytes]:
        """Iterate over the lines in the file, without pending ones."""

    @abstractmethod
    def is_truncated(self) -> bool:
        """Return whether the last line has no newline, as after a crash."""

    @abstractmethod
    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace the file's content atomically."""

    @abstractmethod
    def flush(self, force: bool = False) -> None:
        """Write what is pending; after an error, the unwritten rest stays pending."""

    @abstractmethod
    def close(self) -> None:
        """Write the rest, sync it to disk, and release the file even if that fails."""


class LocalLines(LineFile):
    """A local file, written by appends of complete lines."""

    def __init__(self, path: str, mode: int = _SHARED) -> None:
        super().__init__()
        self.path = path
        with advised(path):
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._fd: int | None = _open_append(path, mode)

    def lines(self) -> Iterator[bytes]:
        """Read the file from its beginning."""
        with open(self.path, "rb") as file:
            yield from file

    def is_truncated(self) -> bool:
        """Check the last byte."""
        with open(self.path, "rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Write a new file, sync it to disk, and rename it over this one."""
        path = os.path.realpath(self.path)
        new = f"{path}.new"
        try:
            with open(new, "wb", opener=lambda name, flags: os.open(name, flags, PRIVATE)) as file:
                file.writelines(lines)
                file.flush()
                sync_file(file.fileno())
            shutil.copymode(path, new)
            self._close_fd()  # some systems cannot replace an open file
            try:
                replace(new, path)
            finally:
                self._fd = _open_append(self.path, _SHARED)
        except BaseException:
            with suppress(OSError):
                remove(new)
            raise
        with suppress(OSError):  # a folder that may not be read cannot be synced
            sync_folder(os.path.dirname(path))

    def flush(self, force: bool = False) -> None:
        """Append; if a nearly full disk takes only a part, the rest stays pending."""
        while self._pending and self._fd is not None:
            written = os.write(self._fd, self._pending)
            del self._pending[:written]

    def close(self) -> None:
        """Write, sync, and close the descriptor."""
        try:
            self.flush()
            if self._fd is not None:
                sync_file(self._fd)
        finally:
            self._close_fd()

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class RemoteLines(LineFile):
    """An object in a store, which cannot be appended to: kept in memory and rewritten."""

    def __init__(self, url: str, every_s: float = UPLOAD_EVERY_S) -> None:
        super().__init__()
        self.path = url
        self._fs, self._key = filesystem(url)
        try:
            self._content = bytearray(self._fs.cat_file(self._key))
        except FileNotFoundError:
            self._content = bytearray()
        self._every_s = every_s
        self._dirty, self._due = False, 0.0

    @property
    def is_dirty(self) -> bool:
        """True while the object is not what it is in memory."""
        return self._dirty or super().is_dirty

    def lines(self) -> Iterator[bytes]:
        """Iterate over the lines in memory."""
        yield from bytes(self._content).splitlines(keepends=True)

    def is_truncated(self) -> bool:
        """Check the last byte."""
        return bool(self._content) and not self._content.endswith(b"\n")

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace the content in memory; the next `flush` that is due writes it."""
        self._content, self._dirty = bytearray().join(lines), True

    def flush(self, force: bool = False) -> None:
        """Write the object if an upload is due, or now with ``force``."""
        if self._pending:
            self._content += self._pending
            self._pending, self._dirty = bytearray(), True
        begin = time.monotonic()
        if not self._dirty or (begin < self._due and not force):
            return
        self._due = begin + self._every_s  # set first: a failing store is not retried each second
        write_object(self._fs, self._key, bytes(self._content))
        took = time.monotonic() - begin
        self._dirty, self._due = False, begin + max(self._every_s, _UPLOAD_SHARE * took)

    def close(self) -> None:
        """Write the object a last time."""
        self.flush(force=True)


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL and the key in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{url} is written with fsspec ({error}): pip install fsspec") from error
    fs, key = url_to_fs(url)
    return fs, str(key)


def write_object(fs: Any, key: str, data: bytes) -> None:
    """Write an object, creating its folder on stores that have folders."""
    try:
        fs.pipe_file(key, data)
    except FileNotFoundError:
        fs.makedirs(posixpath.dirname(key), exist_ok=True)
        fs.pipe_file(key, data)


def read_object(url: str) -> bytes:
    """Return the content of an object.

    Raises:
        FileNotFoundError: there is none.
        ConnectionError: the store cannot be reached.
        OSError: the store refuses to read it.
    """
    with reaching(url) as (fs, key):
        return bytes(fs.cat_file(key))


def list_names(url: str) -> list[str]:
    """Return the names in a folder of a store, sorted.

    Raises:
        FileNotFoundError: there is no such folder.
        ConnectionError: the store cannot be reached.
    """
    with reaching(url) as (fs, key):
        return sorted({base_name(str(entry)) for entry in fs.ls(key, False)})


@contextmanager
def reaching(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the filesystem of a URL and the key in it, and tell a store that cannot be reached.

    Raises:
        ConnectionError: it cannot be; each library of a store has errors of its own for that.
    """
    fs, key = filesystem(url)
    try:
        yield fs, key
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:
        raise ConnectionError(
            f"{url} is unreachable ({type(error).__name__}: {error}): look at the network, the "
            "address of the store and the credentials, and try again"
        ) from error


def _open_append(path: str, mode: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, mode)
