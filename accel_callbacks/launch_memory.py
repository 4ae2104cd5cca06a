"""The folder of a launch in host memory, where the state of a run outlives its processes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

__all__ = ["ROOT", "VARIABLE", "free_bytes", "refusal_of_memory"]

ROOT = Path("/dev/shm")  # Linux has a file system in host memory there
#: Environment variable with the folder; set by launchers that restart processes.
VARIABLE = "ACCEL_LAUNCH_MEMORY"


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


def free_bytes(folder: str) -> int:
    """Return the bytes that are free in host memory for files of a folder there."""
    from checkpoint_io.memory import free_memory

    free = shutil.disk_usage(folder).free
    return min(free, free_memory() or free)
