"""Making files and names survive a power cut."""

from __future__ import annotations

import errno
import os
from contextlib import suppress


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
