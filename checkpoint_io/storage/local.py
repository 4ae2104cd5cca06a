"""LocalStore: one saver at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from checkpoint_io.errors import CheckpointConflictError
from checkpoint_io.storage.base import Deliver, Span, Write, probe_by_writing
from checkpoint_io.storage.buffers import BufferPool
from checkpoint_io.storage.local_read import LocalFetch, LocalReader, open_regular
from checkpoint_io.storage.local_write import (
    explained,
    make_folders,
    open_output,
    sync_file,
    sync_folder,
)

__all__ = ["LocalStore", "make_folders", "sync_file", "sync_folder"]

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_TRIES = 100
_CREATE = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


@contextmanager
def folder_lock(path: str) -> Iterator[None]:
    """Hold the lock of a folder, made if it is absent, during the block.

    Held by another process, or by another thread of this one: CheckpointConflictError. Where
    folders cannot be locked (Windows, some network filesystems) the block runs without a lock.
    """
    make_folders(path)
    if os.name == "nt":
        yield
        return
    import fcntl

    descriptor = _locked(path)
    try:
        yield
    finally:
        # by name and not by closing: a child that was forked meanwhile holds a copy
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _locked(path: str) -> int:
    """Open and lock the folder that has this name, and not one that was removed meanwhile."""
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            _lock(descriptor, path)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        make_folders(path)
    raise CheckpointConflictError(
        f"{path} is removed and made again all the time: give each job a folder of its own"
    )


def _lock(descriptor: int, path: str) -> None:
    """Take the lock at once or not at all; a filesystem without locks is left unlocked."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise CheckpointConflictError(
                f"another process is saving to {path} right now; "
                "give each job a folder of its own or wait"
            ) from None
        if error.errno not in (
            errno.ENOTSUP,
            errno.EINVAL,
            errno.EBADF,
            errno.ENOLCK,
            errno.ENOSYS,
        ):
            raise


class LocalStore:
    """Files of one local folder; every write is fsynced, links inside are not followed."""

    can_rename = True
    span_bytes = 2 * 2**20  # what is read at a time stays in the processor's cache until it is used

    def __init__(self, path: str, *, buffers: BufferPool | None = None) -> None:
        """Use the folder at `path`; `buffers` bounds the memory of all its writes together."""
        self._path = os.path.abspath(os.path.expanduser(path))
        self._buffers = buffers or BufferPool()
        self.url = self._path

    def _at(self, name: str) -> str:
        """Return the full path of a file in this folder."""
        return os.path.join(self._path, name)

    @contextmanager
    def create(self, name: str, size: int | None = None) -> Iterator[Write]:
        """Write a file that must not exist yet; it is removed again if the block raises."""
        path = self._at(name)
        with explained(path):
            make_folders(self._path)
            descriptor = os.open(path, _CREATE, 0o666)
        try:
            with self._buffers.held():
                output = open_output(descriptor, path, size, self._buffers)
                try:
                    yield output.write
                    output.finish()
                finally:
                    output.close()
            with explained(path):
                sync_file(descriptor)
                _check_present(descriptor, path)
                sync_folder(self._path)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def token(self, name: str) -> str:
        """Return inode, size and times of the file."""
        try:
            status = os.lstat(self._at(name))
        except (FileNotFoundError, NotADirectoryError):
            return ""
        return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder itself, as long as the block and this process live."""
        with folder_lock(self._path), self._buffers.held():
            yield

    def fetch(self, spans: Sequence[Span], deliver: Deliver) -> None:
        """Read spans in some threads, this one among them, each file opened without following."""
        LocalFetch(self._path, spans, deliver).run()

    def remove_many(self, names: Sequence[str]) -> None:
        """Remove files in order; the first is gone for good before the second is touched."""
        removed = 0
        try:
            for name in names:
                if self._unlink(name):
                    removed += 1
                    if removed == 1:
                        self._sync()
        finally:
            if removed > 1:
                self._sync()

    def _sync(self) -> None:
        """Make removals durable; those of a folder that is gone itself need nothing."""
        with suppress(FileNotFoundError):
            sync_folder(self._path)

    def abort_uploads(self, save_id: str) -> None:
        """Do nothing: a killed write leaves a file, which is found by its name."""

    def probe(self) -> None:
        """Write, read back and remove a small file."""
        probe_by_writing(self)

    def replace(self, name: str, data: bytes, temporary: str, expected: str | None = None) -> None:
        """Write beside the target, then rename over it; both the file and the name are synced.

        `expected` is compared right before the rename: it is as good as the lock of the caller.
        """
        with self.create(temporary, len(data)) as write:
            write(memoryview(data))
        try:
            if expected is not None and self.token(name) != expected:
                raise CheckpointConflictError(
                    f"{self._at(name)} was changed by another save meanwhile: "
                    "give each job a folder of its own"
                )
            self.rename(temporary, name)
        except BaseException:
            with suppress(OSError):
                self._unlink(temporary)
            raise

    def rename(self, old: str, new: str) -> None:
        """Rename atomically and make the new name durable."""
        with explained(self._at(new)):
            os.replace(self._at(old), self._at(new))
            sync_folder(self._path)

    def open(self, name: str) -> AbstractContextManager[LocalReader]:
        """Open a regular file for reading; a link or a device is refused."""
        return open_regular(self._at(name))

    def sizes(self) -> dict[str, int]:
        """List the regular files; links are not listed."""
        found = {}
        for entry in self._scan():
            with suppress(FileNotFoundError):  # removed since the folder was read
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

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
        self.remove_many([name])

    def _unlink(self, name: str) -> bool:
        """Remove one name; say whether it was there."""
        path = self._at(name)
        try:
            with explained(path):
                os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def remove_folder(self) -> None:
        """Remove the folder if it is empty."""
        with suppress(OSError):
            os.rmdir(self._path)

    def child(self, name: str) -> LocalStore:
        """Return the folder inside this one."""
        if not name or os.path.basename(name) != name or name in (".", ".."):
            raise ValueError(f"not a plain folder name: {name!r}")
        return LocalStore(self._at(name), buffers=self._buffers)


def _check_present(descriptor: int, path: str) -> None:
    """Raise if the file, or its folder, was removed while it was written."""
    # both, as some mounted filesystems count no links
    if os.fstat(descriptor).st_nlink == 0 and not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
