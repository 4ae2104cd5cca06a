"""Trigger: a flag that any rank may raise, and all ranks read together."""

from __future__ import annotations

from accel_callbacks import collectives

__all__ = ["Trigger"]


class Trigger:
    """A flag that any rank may raise, and all ranks read together.

    Example:
        >>> from accel_callbacks.distributed.trigger import Trigger
        >>> trigger = Trigger()
        >>> trigger.set()
        >>> trigger.check(), trigger.check()
        (True, False)
    """

    def __init__(self) -> None:
        self._raised = False

    def set(self) -> None:
        """Raise the flag of this rank."""
        self._raised = True

    def check(self) -> bool:
        """Collective: return whether any rank has raised it, and lower it on all ranks."""
        raised = collectives.any_process(self._raised)
        self._raised = False
        return raised
