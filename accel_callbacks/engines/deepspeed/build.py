"""The operators that DeepSpeed builds on first use: what it builds, and locks left behind."""

from __future__ import annotations

import time
from pathlib import Path

from accel_callbacks.logging import notice

__all__ = ["check_builds"]

#: Seconds. A build takes one to five minutes; a lock that is older has lost its owner.
_OLD = 1800.0


def check_builds(*operators: str) -> None:
    """Announce a build, and refuse to wait for one that was ended long ago.

    A build that is ended leaves its lock, for which each later process waits without a word.

    Args:
        *operators: names of those that are built next, if they are not yet.

    Raises:
        RuntimeError: a lock is old.
    """
    from torch.utils import cpp_extension

    try:  # creates the folder, as a build does
        folder = Path(cpp_extension._get_build_directory("deepspeed", verbose=False)).parent
    except OSError:  # nothing can be built there: the operators have been installed
        return
    for lock in folder.glob("*/lock"):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # that build has just ended
            continue
        if age > _OLD:
            raise RuntimeError(
                f"{lock} is the lock of a build that was ended {age / 60:.0f} minutes ago, and "
                "DeepSpeed would wait for it without a word: remove the file and start again."
            )
        notice(f"DeepSpeed waits for {lock}: if no process builds it now, remove the file")
    for name in operators:
        if not (folder / name / f"{name}.so").exists():
            notice(f"DeepSpeed builds {name} in {folder}, once: this takes some minutes")
