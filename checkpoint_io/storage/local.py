"""A folder on a local disk: durable writes, and a lock that admits one saver at a time."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from checkpoint_io.errors import CheckpointConflictError, CheckpointWarning
from checkpoint_io.local_files import make_folders, remove, replace, sync_file, sync_folder
from checkpoint_io.storage import local_read
from checkpoint_io.storage.base import (
    Deliver,
    Span,
    Store,
    Write,
    conflict_error,
    probe_by_writing,
)
from checkpoint_io.storage.buffers import BufferPool
from checkpoint_io.storage.file_lock import LOCK_HELD, NO_LOCKS, lock_file, unlock_file
from checkpoint_io.storage.local_read import LocalReader, forget_pages, open_regular
from checkpoint_io.storage.local_write import (
    SMALL_FILE,
    explained,
    open_output,
)
from checkpoint_io.warning import warn

__all__ = ["LocalStore", "local_folder"]

_LOCK_TRIES = 100
_LOCK_PAUSE = 0.01  # seconds, while Windows still removes a lock file
_MOST_UNSYNCED = 64  # open files
# O_EXCL and O_NOFOLLOW: never write into a file, or through a link, that somebody else put there
_CREATE = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


class LocalStore:
    """Files of one local folder; every write is fsynced, links inside are not followed."""

    can_rename = True
    can_remove = True
    compares = True
    span_bytes = 2 * 2**20  # small enough to stay in the CPU cache between reading and hashing

    def __init__(self, path: str, *, buffers: BufferPool | None = None) -> None:
        """Open the folder at `path`; `buffers` bounds the memory of all its writes together."""
        self._path = os.path.abspath(os.path.expanduser(path))
        self._buffers = buffers or BufferPool()
        self._batch: _Batch | None = None
        self.url = self._path

    def _at(self, name: str) -> str:
        """Return the full path of a file in this folder."""
        return os.path.join(self._path, name)

    @contextmanager
    def create(
        self, name: str, size: int | None = None, *, sync_name: bool = True
    ) -> Iterator[Write]:
        """Write a file that must not exist yet; remove it again if the block raises.

        Without `sync_name`, its name is not durable yet.
        """
        path, batch, kept = self._at(name), self._batch, False
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
            # first the bytes, then the name: a crash in between leaves no file with wrong content
            with explained(path):
                kept = batch is not None and batch.take(descriptor, path, size)
                if not kept:
                    _sync(descriptor, path)
                if batch is None and sync_name:
                    sync_folder(self._path)
        except BaseException:
            if not kept:
                with suppress(OSError):
                    os.close(descriptor)  # first: Windows removes no file that is open
            _discard(path)
            raise
        if not kept:
            os.close(descriptor)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Sync small files that are created in the block at its end, and the folder once.

        Each of them alone would wait for the journal of the filesystem.
        """
        self._batch = batch = _Batch()
        try:
            yield
            batch.sync()
            if batch.used:
                with explained(self._path):
                    sync_folder(self._path)
        except BaseException:
            batch.remove()
            raise
        finally:
            self._batch = None
            batch.close()

    def token(self, name: str) -> str:
        """Return inode, size and timestamps of the file as one string."""
        try:
            status = os.lstat(self._at(name))
        except (FileNotFoundError, NotADirectoryError):
            return ""
        return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder itself until the block, or this process, ends."""
        with folder_lock(self._path), self._buffers.held():
            yield

    def fetch(self, spans: Sequence[Span], deliver: Deliver) -> None:
        """Read spans, long ones on several threads, without following links."""
        local_read.fetch(self._path, spans, deliver)

    def fetch_into(
        self,
        spans: Sequence[Span],
        views: Sequence[Sequence[memoryview[int]]],
        filled: Callable[[int], None],
    ) -> None:
        """Read each span straight into its views, on several threads (where `can_read_into`)."""
        local_read.fetch_into(self._path, spans, views, filled)

    def forget(self, name: str) -> None:
        """Drop a file from the page cache, where the system has a call for that."""
        forget_pages(self._at(name))

    def remove_many(self, names: Sequence[str]) -> None:
        """Remove files in order; the first removal is durable before the second begins."""
        removed = 0
        try:
            for name in names:
                if self._unlink(name):
                    removed += 1
                    # the first is the manifest: it must not outlive, in a crash, the files it names
                    if removed == 1:
                        self._sync()
        finally:
            if removed > 1:
                self._sync()

    def _sync(self) -> None:
        """Make removals durable, unless the folder itself is gone."""
        with suppress(FileNotFoundError):
            sync_folder(self._path)

    def abort_uploads(self, save_id: str) -> None:
        """Do nothing: a killed write leaves a plain file, which is found by its name."""

    def probe(self) -> None:
        """Write, read back and remove a small file."""
        probe_by_writing(self)

    def replace(self, name: str, data: bytes, temporary: str, expected: str | None = None) -> None:
        """Write a temporary file, then rename it over the target; sync both file and name.

        `expected` is compared right before the rename; only the caller's lock makes the two atomic.
        """
        # The name of the temporary file need not be durable: the rename replaces it.
        with self.create(temporary, len(data), sync_name=False) as write:
            write(memoryview(data))
        try:
            if expected is not None and self.token(name) != expected:
                raise conflict_error(self._at(name))
            self.rename(temporary, name)
        except BaseException:
            _discard(self._at(temporary))
            raise

    def reconnect(self) -> None:
        """Do nothing: local files are read over no connection; `forget` drops their pages."""

    def rename(self, old: str, new: str) -> None:
        """Rename atomically and make the new name durable."""
        with explained(self._at(new)):
            replace(self._at(old), self._at(new))
            sync_folder(self._path)

    def open(self, name: str) -> AbstractContextManager[LocalReader]:
        """Open a regular file for reading; refuse links and devices."""
        return open_regular(self._at(name))

    def sizes(self) -> dict[str, int]:
        """List the regular files; links are not listed."""
        sizes = {}
        for entry in self._scan():
            with suppress(FileNotFoundError):  # removed since the folder was read
                if entry.is_file(follow_symlinks=False):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def folders(self) -> list[str]:
        """List the folders; links are not listed."""
        return sorted(e.name for e in self._scan() if e.is_dir(follow_symlinks=False))

    def versions(self, name: str) -> dict[str, str]:
        """List the folders, each with the token of its file of this name."""
        return {folder: self.token(os.path.join(folder, name)) for folder in self.folders()}

    def _scan(self) -> list[os.DirEntry[str]]:
        """List the entries of the folder; none if it does not exist."""
        try:
            with os.scandir(self._path) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, name: str) -> None:
        """Remove one file durably."""
        self.remove_many([name])

    def _unlink(self, name: str) -> bool:
        """Remove one name; return whether it existed."""
        path = self._at(name)
        try:
            with explained(path):
                remove(path)
        except FileNotFoundError:
            return False
        return True

    def remove_folder(self) -> None:
        """Remove the folder if it is empty."""
        with suppress(OSError):
            os.rmdir(self._path)

    def child(self, name: str) -> LocalStore:
        """Return the store of a folder inside this one."""
        # not `child_name`: a local folder may have a backslash in its name
        if not name or os.path.basename(name) != name or name in (".", ".."):
            raise ValueError(f"not a plain folder name: {name!r}")
        return LocalStore(self._at(name), buffers=self._buffers)


class _Batch:
    """Small files that are written and not synced yet."""

    def __init__(self) -> None:
        self._files: list[tuple[int, str]] = []
        self.used = False

    def take(self, descriptor: int, path: str, size: int | None) -> bool:
        """Return whether this file is synced with the batch, and then closed by it."""
        self.used = True
        small = size is not None and size < SMALL_FILE
        if not small or len(self._files) >= _MOST_UNSYNCED:
            return False
        self._files.append((descriptor, path))
        return True

    def sync(self) -> None:
        """Sync the files; their names are durable once the folder is synced."""
        for descriptor, path in self._files:
            with explained(path):
                _sync(descriptor, path)

    def remove(self) -> None:
        """Close and remove the files, last written first: the first one names the run."""
        paths = [path for _, path in reversed(self._files)]
        self.close()
        for path in paths:
            _discard(path)

    def close(self) -> None:
        """Close the files."""
        for descriptor, _ in self._files:
            os.close(descriptor)
        self._files.clear()


def _discard(path: str) -> None:
    """Remove what a failed write has left, if there is anything."""
    with suppress(OSError):
        remove(path)


def _sync(descriptor: int, path: str) -> None:
    """Flush a file to the disk; raise FileNotFoundError if it, or its folder, was removed."""
    sync_file(descriptor)
    # check both: some mounted filesystems always report 0 links
    if os.fstat(descriptor).st_nlink == 0 and not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def local_folder(store: Store) -> str | None:
    """Return the path of a store's folder on this machine, None for a remote store."""
    return store.url if isinstance(store, LocalStore) else None


@contextmanager
def folder_lock(path: str) -> Iterator[None]:
    """Hold the lock of a folder, created if missing, during the block.

    Windows cannot open folders: there the lock is that of a file beside the folder.

    CheckpointConflictError if another process, or another thread of this one, holds it. Where
    there are no locks (some network filesystems) the block runs without one.
    """
    make_folders(path)
    try:
        import fcntl  # noqa: F401
    except ImportError:
        with _file_lock(path):
            yield
        return
    descriptor = _lock_folder(path)
    try:
        yield
    finally:
        with suppress(OSError):
            unlock_file(descriptor)
        os.close(descriptor)


def _lock_folder(path: str) -> int:
    """Open and lock the folder that has this name now, and return its descriptor."""
    for _ in range(_LOCK_TRIES):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            _lock(descriptor, path)
            # between open and lock another process may have removed the folder and made a new one
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
        f"{path} is removed and created again all the time: give each job a folder of its own"
    )


def _lock(descriptor: int, path: str) -> None:
    """Take the lock without waiting; only warn on a filesystem without locks."""
    try:
        lock_file(descriptor)
    except OSError as error:
        if error.errno in LOCK_HELD:
            raise _conflict_error(path) from None
        if error.errno not in NO_LOCKS:
            raise
        _tell_unlocked(path)


def _tell_unlocked(path: str) -> None:
    """Warn, once for each disk, that nothing keeps two savers apart there."""
    disk = os.stat(path).st_dev
    if disk not in _unlocked:
        _unlocked.add(disk)
        warn(
            f"the disk of {path} has no file locks: two jobs that save to one path at the same "
            "moment may both report success; give each job a folder of its own",
            CheckpointWarning,
        )


_unlocked: set[int] = set()  # disks of which this process was told


def _conflict_error(path: str) -> CheckpointConflictError:
    """Return the error for a folder that another saver has locked."""
    return CheckpointConflictError(
        f"another process is saving to {path} right now; give each job a folder of its own or wait"
    )


@contextmanager
def _file_lock(path: str) -> Iterator[None]:
    """Hold the lock of a folder by that of a file beside it, which is removed at the end."""
    # not inside: the folder is removed while it is locked, and Windows keeps a file that is open
    folder, name = os.path.split(path)
    at = os.path.join(folder, f".{name}.lock")
    descriptor = _open_lock_file(at, path)
    if descriptor is None:
        _tell_unlocked(folder or ".")
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            unlock_file(descriptor)
        os.close(descriptor)
        with suppress(OSError):  # Windows refuses if another saver has opened it meanwhile
            os.unlink(at)


def _open_lock_file(at: str, path: str) -> int | None:
    """Create, open and lock the file, and return its descriptor; None where that is impossible."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    for _ in range(_LOCK_TRIES):
        try:
            descriptor = os.open(at, flags, 0o666)
        except PermissionError:  # no right to create it; or Windows still removes the last one
            time.sleep(_LOCK_PAUSE)
            continue
        try:
            lock_file(descriptor)
            # the holder before may have removed the file between open and lock
            if os.path.samestat(os.fstat(descriptor), os.stat(at)):
                return descriptor
        except FileNotFoundError:
            pass
        except ImportError:
            os.close(descriptor)
            _discard(at)
            return None
        except OSError as error:
            os.close(descriptor)
            if error.errno in LOCK_HELD:
                raise _conflict_error(path) from None
            if error.errno in NO_LOCKS:
                return None
            raise
        os.close(descriptor)
    return None
