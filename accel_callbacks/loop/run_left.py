"""RunLeft: the exit of a script to the end of its run, between two step boundaries."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RunLeft"]


class RunLeft(SystemExit):
    """Unwinds the script to the end of ``accel.run``, which ends it as preempted.

    A SystemExit, so that no handler of errors in the script takes it for one.

    Args:
        reason: of the preemption.
        rank: the one that asked for it.
        go_back: called once the script is unwound, to return to the state that is saved.
    """

    def __init__(self, reason: str, rank: int, go_back: Callable[[], None]) -> None:
        super().__init__(reason)
        self.reason, self.rank, self.go_back = reason, rank, go_back
