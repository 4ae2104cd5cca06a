"""One saver at a time in a local folder, by a lock that no crash can leave behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from checkpoint_io.errors import CheckpointConflictError
from checkpoint_io.stores.durable import make_folders

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_TRIES = 100


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
