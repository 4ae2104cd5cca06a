"""A folder on a local (or mounted) filesystem, written so that it survives a power cut."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from checkpoint_io.errors import CorruptCheckpointError

_COMMON = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _COMMON
# O_NONBLOCK: opening a planted FIFO must not hang
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _COMMON


class LocalStore:
    """Files of one local folder; every write is fsynced, links inside are not followed."""

    can_rename = True

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(os.path.expanduser(path))
        self.url = self._path

    def _at(self, name: str) -> str:
        """Return the full path of a file in this folder."""
        return os.path.join(self._path, name)

    @contextmanager
    def create(self, name: str) -> Iterator[Callable[[memoryview[int]], None]]:
        """Write a file that must not exist yet; it is removed again if the block raises."""
        make_folders(self._path)
        descriptor = os.open(self._at(name), _CREATE, 0o666)
        try:
            yield lambda data: _write_all(descriptor, data)
            sync_file(descriptor)
        except BaseException:
            with suppress(OSError):
                os.unlink(self._at(name))
            raise
        finally:
            os.close(descriptor)
        sync_folder(self._path)

    def replace(self, name: str, data: bytes, temporary: str) -> None:
        """Write beside the target, then rename over it; both the file and the name are synced."""
        with self.create(temporary) as write:
            write(memoryview(data))
        try:
            self.rename(temporary, name)
        except OSError:
            self.remove(temporary)
            raise

    def rename(self, old: str, new: str) -> None:
        """Rename atomically and make the new name durable."""
        os.replace(self._at(old), self._at(new))
        sync_folder(self._path)

    @contextmanager
    def open(self, name: str) -> Iterator[LocalReader]:
        """Open a regular file for reading; a link or a device is refused."""
        try:
            descriptor = os.open(self._at(name), _READ)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CorruptCheckpointError(
                    f"{self._at(name)} is a symbolic link, which is not followed; "
                    "put the file itself there"
                ) from None
            raise
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise CorruptCheckpointError(f"{self._at(name)} is not a regular file")
        with io.FileIO(descriptor, "r") as file:
            yield LocalReader(file, self._at(name), status.st_size)

    def sizes(self) -> dict[str, int]:
        """List the regular files; links are not listed."""
        return {
            entry.name: entry.stat(follow_symlinks=False).st_size
            for entry in self._scan()
            if entry.is_file(follow_symlinks=False)
        }

    def folders(self) -> list[str]:
        """List the folders; links are not listed."""
        return sorted(e.name for e in self._scan() if e.is_dir(follow_symlinks=False))

    def _scan(self) -> list[os.DirEntry[str]]:
        """Read the folder, an absent one as empty."""
        try:
            with os.scandir(self._path) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, name: str) -> None:
        """Remove one file; make the removal durable before the next one starts."""
        with suppress(FileNotFoundError):
            os.unlink(self._at(name))
            sync_folder(self._path)

    def remove_folder(self) -> None:
        """Remove the folder if it is empty."""
        with suppress(OSError):
            os.rmdir(self._path)

    def child(self, name: str) -> LocalStore:
        """Return the folder inside this one."""
        if not name or os.path.basename(name) != name or name in (".", ".."):
            raise ValueError(f"not a plain folder name: {name!r}")
        return LocalStore(self._at(name))


class LocalReader:
    """Ranged reads of one open file into a buffer that is reused."""

    def __init__(self, file: io.FileIO, path: str, size: int) -> None:
        self._file = file
        self._path = path
        self._buffer = bytearray()
        self.size = size

    def read(self, begin: int, end: int) -> memoryview[int]:
        """Read exactly these bytes; the view is valid until the next call."""
        length = end - begin
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        view = memoryview(self._buffer)[:length]
        self._file.seek(begin)
        filled = 0
        while filled < length:
            count = self._file.readinto(view[filled:])
            if not count:
                raise CorruptCheckpointError(
                    f"{self._path}: truncated, ends at byte {begin + filled} of {end}"
                )
            filled += count
        return view


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


def _write_all(descriptor: int, data: memoryview[int]) -> None:
    """Write every byte; the kernel may take fewer than asked."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
