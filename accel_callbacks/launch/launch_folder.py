"""Folders of a launch: of this user alone, gone with the launch, and swept if it was killed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["launch_folder"]

_PREFIX = "accel-launch-"


@contextmanager
def launch_folder(root: Path) -> Iterator[Path]:
    """Context manager: create a folder of this launch, and remove those of killed launchers.

    Args:
        root: where: on the disk, or in host memory.

    Raises:
        OSError: it cannot be created, as in a full file system.
    """
    _remove_dead(root)
    # It is locked before it gets the name by which other launchers look for dead ones.
    folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
    lock: int | None = None
    try:
        with suppress(OSError):  # a file system without locks: nobody takes it for a dead one's
            lock = _lock(folder)
        if lock is not None:
            folder = folder.rename(root / folder.name[1:])
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_dead(root: Path) -> None:
    """Remove the folders whose launchers are dead: these hold no lock any more."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is locked, or another launcher has removed it
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder of this user until the process ends; return the descriptor.

    On Windows, and of a folder of another user, return None.

    Raises:
        OSError: another process has locked it, or it is a link.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None
