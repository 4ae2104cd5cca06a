"""Files made of lines that only grow, on a local disk or as an object in a store."""

from __future__ import annotations

import os
import posixpath
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = [
    "LineFile",
    "filesystem",
    "is_remote",
    "local_path",
    "open_lines",
    "read_lines",
    "write_object",
]

UPLOAD_EVERY_S = 30.0
_UPLOAD_SHARE = 10  # an upload that takes long is made less often: at most a tenth of the time


class LineFile(ABC):
    """Lines of bytes, each with its end; what was added reaches the file in `flush`."""

    path: str

    def __init__(self) -> None:
        self._pending = b""

    @property
    def pending(self) -> int:
        """Bytes that were added and not written."""
        return len(self._pending)

    def add(self, lines: bytes) -> None:
        """Queue whole lines."""
        self._pending += lines

    @abstractmethod
    def lines(self) -> Iterator[bytes]:
        """What the file has, without what is pending."""

    @abstractmethod
    def is_torn(self) -> bool:
        """Say whether the last line has no end, as a crash leaves it."""

    @abstractmethod
    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace all of the file, in one step that a crash cannot halve."""

    @abstractmethod
    def flush(self, force: bool = False) -> None:
        """Write what is pending; what an error kept from being written stays pending."""

    @abstractmethod
    def close(self) -> None:
        """Write the rest, force it to the disk, and let go, even if that fails."""


class LocalLines(LineFile):
    """A file on this machine, written by appends of whole lines."""

    def __init__(self, path: str) -> None:
        super().__init__()
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        self.path = path
        self._fd: int | None = _open_append(path)

    def lines(self) -> Iterator[bytes]:
        """Read it from its beginning."""
        with open(self.path, "rb") as file:
            yield from file

    def is_torn(self) -> bool:
        """Look at the last byte."""
        try:
            with open(self.path, "rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
        except OSError:  # an empty file
            return False

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Write another file beside it, force it to the disk, and give it this one's name."""
        path = os.path.realpath(self.path)
        with open(f"{path}.new", "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, f"{path}.new")
        self._let_go()  # not everywhere can a file that is open be replaced
        try:
            os.replace(f"{path}.new", path)
            _sync_folder(os.path.dirname(path))
        finally:
            self._fd = _open_append(self.path)

    def flush(self, force: bool = False) -> None:
        """Append; a disk that is nearly full takes a part, and the rest stays pending."""
        while self._pending and self._fd is not None:
            written = os.write(self._fd, self._pending)
            self._pending = self._pending[written:]

    def close(self) -> None:
        """Write and sync, and close the descriptor."""
        try:
            self.flush()
            if self._fd is not None:
                os.fsync(self._fd)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class RemoteLines(LineFile):
    """An object in a store, which cannot grow: all of it is kept in memory and written again."""

    def __init__(self, url: str, every_s: float = UPLOAD_EVERY_S) -> None:
        super().__init__()
        self.path = url
        self._fs, self._key = filesystem(url)
        self._content = _read_object(self._fs, self._key)
        self._every_s = every_s
        self._dirty, self._due = False, 0.0

    def lines(self) -> Iterator[bytes]:
        """Go through what is in memory."""
        yield from bytes(self._content).splitlines(keepends=True)

    def is_torn(self) -> bool:
        """Look at the last byte."""
        return bool(self._content) and not self._content.endswith(b"\n")

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Take the new lines; the next `flush` that is due writes them."""
        self._content, self._dirty = bytearray().join(lines), True

    def flush(self, force: bool = False) -> None:
        """Write the object if the last time is long ago, or now with ``force``."""
        if self._pending:
            self._content += self._pending
            self._pending, self._dirty = b"", True
        begin = time.monotonic()
        if not self._dirty or (begin < self._due and not force):
            return
        self._due = begin + self._every_s  # a store that fails is not asked each second either
        write_object(self._fs, self._key, bytes(self._content))
        took = time.monotonic() - begin
        self._dirty, self._due = False, begin + max(self._every_s, _UPLOAD_SHARE * took)

    def close(self) -> None:
        """Write the object a last time."""
        self.flush(force=True)


def open_lines(logging_dir: str, filename: str) -> LineFile:
    """Open ``filename`` in a folder that is a path or an fsspec URL; makes both if needed."""
    if is_remote(logging_dir):
        return RemoteLines(f"{logging_dir.rstrip('/')}/{filename}")
    return LocalLines(os.path.join(local_path(logging_dir), filename))


def read_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Go through the lines of a file, given by path or URL.

    Raises:
        FileNotFoundError: there is none.
    """
    name = os.fspath(path)
    if is_remote(name):
        fs, key = filesystem(name)
        yield from fs.cat_file(key).splitlines(keepends=True)
        return
    with open(local_path(name), "rb") as file:
        yield from file


def is_remote(path: str) -> bool:
    """Say whether a path is a URL of a store."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme not in ("file", "local")


def local_path(path: str) -> str:
    """Return a path, or what a ``file://`` URL stands for, as a path of this machine."""
    _, separator, rest = path.partition("://")
    return rest if separator else path


def write_object(fs: Any, key: str, data: bytes) -> None:
    """Write one whole object; makes its folder on stores that have folders."""
    try:
        fs.pipe_file(key, data)
    except FileNotFoundError:
        fs.makedirs(posixpath.dirname(key), exist_ok=True)
        fs.pipe_file(key, data)


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL and the key in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{url} is written with fsspec ({error}): pip install fsspec") from error
    fs, key = url_to_fs(url)
    return fs, str(key)


def _read_object(fs: Any, key: str) -> bytearray:
    try:
        return bytearray(fs.cat_file(key))
    except FileNotFoundError:
        return bytearray()


def _open_append(path: str) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o644)


def _sync_folder(folder: str) -> None:
    """Make a rename survive a power cut, where folders can be synced."""
    try:
        fd = os.open(folder or ".", os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:  # not on every filesystem
        pass
    finally:
        os.close(fd)
