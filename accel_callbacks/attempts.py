"""A part of a load that all processes try together, and give up together."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from accel_callbacks.errors import RemoteError
from accel_callbacks.saving_lane import SavingLane

__all__ = ["LoadFailed", "together"]

T = TypeVar("T")


class LoadFailed(Exception):
    """A part of a load failed on some process; raised on all of them alike.

    Attributes:
        error: what to raise on this process: its own error, or a :class:`RemoteError`.
        damaged: the checkpoint is why, on each process that failed: an older one may do.
        changed: something here, on some process, is not what it was before the part began.
        text: what happened, by rank.
    """

    def __init__(self, error: Exception, damaged: bool, changed: bool, text: str) -> None:
        super().__init__(text)
        self.error, self.damaged, self.changed, self.text = error, damaged, changed, text


def together(where: str, action: Callable[[], T], *, changes: bool = False) -> T:
    """Collective: the action's result, if it succeeds on all processes.

    It may take long on some: the others wait in a group that is for that.

    Args:
        where: shown in the errors of the other processes.
        action: what to do; errors that are no ``Exception`` pass through.
        changes: the action changes what is here, so that a success on one process is a change.

    Raises:
        LoadFailed: on all processes, if the action failed on one.

    Example:
        >>> from accel_callbacks.attempts import together
        >>> together("counting", lambda: 3)
        3
    """
    lane = SavingLane()
    lane.take()
    error: Exception | None = None
    well = False
    try:
        try:
            result = action()
        except Exception as problem:
            error = problem
        reports = lane.all_gather_object(_report(error, changes))
        well = True
    finally:
        (lane.leave if well else lane.close)()
    failed = [(rank, report) for rank, report in enumerate(reports) if report.text]
    if not failed:
        return result
    rank, first = failed[0]
    shown = error or RemoteError(rank=rank, where=where, details=first.details)
    many = len(reports) > 1
    text = "; ".join(f"rank {one}: {r.text}" if many else r.text for one, r in failed)
    damaged = all(report.damaged for report in reports)
    raise LoadFailed(shown, damaged, any(report.changed for report in reports), text) from error


class _Report(NamedTuple):
    """How it went on one process; no text where it went well."""

    text: str
    details: str
    damaged: bool
    changed: bool


def _report(error: Exception | None, changes: bool) -> _Report:
    if error is None:
        return _Report("", "", damaged=True, changed=changes)
    details = "".join(traceback.format_exception(error))
    changed = changes and _half_done(error)
    return _Report(f"{type(error).__name__}: {error}", details, _is_damage(error), changed)


def _is_damage(error: Exception) -> bool:
    """Whether the checkpoint is at fault, and not, say, a network that is down."""
    import checkpoint_io

    damage = (checkpoint_io.CorruptCheckpointError, checkpoint_io.CheckpointNotFoundError)
    cause = error.__cause__ if _half_done(error) else None
    return isinstance(cause or error, (*damage, FileNotFoundError))


def _half_done(error: Exception) -> bool:
    import checkpoint_io

    return isinstance(error, checkpoint_io.TornLoadError)
