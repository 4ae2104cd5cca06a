"""What add-ons and engines bring to a launch; a new one is added to the registry here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from typing import cast

from accel_callbacks.launch.program import Program
from accel_callbacks.launch.settings import LaunchSettings

__all__ = ["LaunchExtension", "extensions"]

#: Classes with their modules, which are imported at each launch, and import no torch.
_REGISTRY = (
    "accel_callbacks.launch.tpu.TpuLaunch",
    "accel_callbacks.addons.resilience.memory_folder.MemoryFolder",
    "accel_callbacks.addons.journal.launch_goodput.LaunchGoodput",
)


class LaunchExtension:
    """A part of one launch; each method has nothing to add by default."""

    def command(
        self, settings: LaunchSettings, program: Program
    ) -> tuple[tuple[str, ...], Mapping[str, str]] | None:
        """Return what runs in place of torch's launcher, and its variables; None to run that.

        Args:
            settings: of the launch.
            program: of the user.

        Raises:
            SettingsError: the program cannot be run in this way.
        """
        return None

    def start_workers(self, stack: ExitStack, restarts: int) -> Mapping[str, str]:
        """Return variables for the processes of all attempts, before the first of them starts.

        Args:
            stack: closed after the last one has ended.
            restarts: how often all processes may be restarted.
        """
        return {}

    def summary(self) -> str:
        """Return what to add to the line about several attempts, once all of them have ended."""
        return ""


@cache
def extensions() -> tuple[type[LaunchExtension], ...]:
    """Return the registered extensions."""
    homes = (path.rpartition(".") for path in _REGISTRY)
    return tuple(
        cast("type[LaunchExtension]", getattr(import_module(module), name))
        for module, _, name in homes
    )
