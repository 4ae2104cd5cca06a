"""The folder in host memory in which the state of a run outlives its processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from accel_callbacks import launch_memory
from accel_callbacks.launch.extension import LaunchExtension
from accel_callbacks.launch.launch_folder import launch_folder

__all__ = ["MemoryFolder"]


class MemoryFolder(LaunchExtension):
    """Creates the folder for a launch that may restart its processes."""

    def start_workers(self, stack: ExitStack, restarts: int) -> Mapping[str, str]:
        """Return the variable with the folder; empty if nothing is kept, or if there is no room."""
        folder = ""
        if restarts and sys.platform == "linux":
            with suppress(OSError):  # such as a full file system, or none there
                folder = str(stack.enter_context(launch_folder(launch_memory.ROOT)))
        return {launch_memory.VARIABLE: folder}
