"""The operators that DeepSpeed builds on first use: what it builds, and locks left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from accel_callbacks.logging import notice

__all__ = ["Lock", "building", "stale_locks"]

#: Seconds. A build takes one to five minutes; a lock that is older has probably lost its owner.
_OLD = 600.0


def _folder() -> str:
    """Return where torch builds extensions."""
    from torch.utils import cpp_extension

    return str(
        os.environ.get("TORCH_EXTENSIONS_DIR")
        or os.path.join(cpp_extension.get_default_build_root(), _version())
    )


def _version() -> str:
    """Return the folder that torch adds for the interpreter and the build of torch."""
    import sys

    import torch

    build = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    abi = getattr(sys, "abiflags", "")
    return f"py{sys.version_info.major}{sys.version_info.minor}{abi}_{build}"


class Lock(NamedTuple):
    """A lock file that no process of this machine holds, and its age in seconds."""

    path: str
    age: float


def stale_locks(folder: str, now: float) -> list[Lock]:
    """Return lock files of builds that no process of this machine is running.

    A build that is ended leaves its lock, and each later process waits for it without a word.

    Args:
        folder: where torch builds extensions, a folder for each.
        now: the time in seconds since the epoch.
    """
    locks = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        path = os.path.join(folder, name, "lock")
        try:
            age = now - os.stat(path).st_mtime
        except OSError:
            continue
        if not _is_open(path):
            locks.append(Lock(path, age))
    return locks


def _is_open(path: str) -> bool:
    """Return whether a process has a file open, as far as the system shows it."""
    wanted = os.path.realpath(path)
    try:
        processes = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return False
    for process in processes:
        try:
            with os.scandir(f"/proc/{process}/fd") as files:
                if any(os.path.realpath(descriptor.path) == wanted for descriptor in files):
                    return True
        except OSError:  # it has ended, or belongs to another user
            continue
    return False


@contextmanager
def building(*operators: str) -> Iterator[None]:
    """Context manager: announce a build, and refuse to wait for one that was ended long ago.

    Args:
        *operators: names of those that are built in it if they are not yet.

    Raises:
        RuntimeError: a lock is old, and nobody holds it.
    """
    folder = _folder()
    for lock in stale_locks(folder, time.time()):
        if lock.age > _OLD:
            raise RuntimeError(
                f"{lock.path} is the lock of a build that was ended {lock.age / 60:.0f} minutes "
                "ago, and DeepSpeed would wait for it without a word: remove the file and start "
                "again."
            )
        notice(
            f"DeepSpeed waits for {lock.path}, which no process of this machine holds: if no other "
            "machine builds it now, remove the file and start again"
        )
    for name in operators:
        if not os.path.exists(os.path.join(folder, name, f"{name}.so")):
            notice(f"DeepSpeed builds {name} in {folder}, once: this takes some minutes")
    yield
