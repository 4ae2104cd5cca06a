"""The folder of a launch in host memory, where the state of a run outlives its processes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["ROOT", "VARIABLE", "memory_folder", "refusal_of_memory"]

ROOT = Path("/dev/shm")  # Linux has a file system in host memory there
#: Environment variable with the folder; set by launchers that restart processes.
VARIABLE = "ACCEL_LAUNCH_MEMORY"
_PREFIX = "accel-launch-"


@contextmanager
def memory_folder() -> Iterator[Path | None]:
    """Context manager: create a folder in host memory, None if that is not possible here.

    What launchers that were killed have left there is removed first.
    """
    if sys.platform == "linux":
        import fcntl

        lock: int | None = None
        folder: Path | None = None
        with suppress(OSError):  # such as a full file system, or none there
            _remove_dead()
            # It is locked before it gets the name by which other launchers look for dead ones.
            unnamed = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=ROOT))
            lock = os.open(unnamed, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = unnamed.rename(ROOT / unnamed.name[1:])
        try:
            yield folder
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)
    else:
        yield None


def _remove_dead() -> None:
    """Remove the folders whose launchers are dead: these hold no lock any more."""
    if sys.platform == "linux":
        import fcntl

        for folder in ROOT.glob(f"{_PREFIX}*"):
            with suppress(OSError):  # it is locked, or another launcher has removed it
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(lock).st_uid == os.geteuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def refusal_of_memory() -> str:
    """Return why this process cannot leave its state in memory; empty if it can."""
    if sys.platform != "linux":
        return "it needs a file system in memory, which only Linux has at a known place"
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"only `accel launch --max_restarts N` keeps it for a restart, in {ROOT}"
    try:
        status = os.lstat(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return f"{folder} must belong to this user alone"
    return ""
