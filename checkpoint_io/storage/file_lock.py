"""The lock of an open file or folder, which ends with the process that holds it."""

from __future__ import annotations

import errno
import importlib
import os

__all__ = ["LOCK_HELD", "NO_LOCKS", "lock_file", "unlock_file"]

LOCK_HELD = (errno.EWOULDBLOCK, errno.EACCES)
NO_LOCKS = (errno.ENOTSUP, errno.EINVAL, errno.EBADF, errno.ENOLCK, errno.ENOSYS)
_LOCKED_BYTE = 1 << 30  # beyond the end: Windows lets nobody read what is locked


def lock_file(descriptor: int) -> None:
    """Take the lock without waiting for it.

    Raises:
        OSError: another process has it (an errno of `LOCK_HELD`), or there are no locks on this
            filesystem (one of `NO_LOCKS`).
        ImportError: this Python lacks the module for the locks of its system.
    """
    _change_lock(descriptor, "LOCK_EX", "LK_NBLCK")


def unlock_file(descriptor: int) -> None:
    """Give the lock back; to close is not enough if a child that was forked has a copy."""
    _change_lock(descriptor, "LOCK_UN", "LK_UNLCK")


def _change_lock(descriptor: int, posix: str, windows: str) -> None:
    try:
        locks = importlib.import_module("fcntl")
    except ImportError:
        locks = importlib.import_module("msvcrt")
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        locks.locking(descriptor, getattr(locks, windows), 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        locks.flock(descriptor, getattr(locks, posix) | locks.LOCK_NB)
