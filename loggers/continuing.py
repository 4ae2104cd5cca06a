"""What the built-in trackers share: which run to go on with, and up to which step to keep it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from loggers.base import RunInfo, Status, Tracker, check_status

__all__ = ["ContinuingTracker", "opened"]

T = TypeVar("T")


class ContinuingTracker(Tracker):
    """A tracker that goes on with its run after a resume, and may be used for one after the other.

    Its state is the id of its run and the last step that it logged.

    Args:
        all_ranks: log on every process rather than on the main one only.
    """

    def __init__(self, *, all_ranks: bool = False) -> None:
        self.main_process_only = not all_ranks
        self._run_id: str | None = None
        self._last_step: int | None = None
        self._loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Return the run id and the last step that was logged."""
        return {"run_id": self._run_id, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the run that ``state`` names."""
        self._run_id = state.get("run_id")
        self._last_step = state.get("last_step")
        self._loaded = True

    def _begin(self, run: RunInfo) -> int | None:
        """Settle the id of the run; return the last step to keep, None for a fresh run.

        Steps that the checkpoint has seen are kept whatever their unit is: those of somebody who
        counts samples are far above the optimizer steps of ``resumed_step``.
        """
        if not self._loaded:
            self._run_id, self._last_step = None, None
        self._run_id = self._run_id or run.run_id
        if run.resumed_step is None:
            return None
        return max(run.resumed_step, -1 if self._last_step is None else self._last_step)

    def _seen(self, step: int) -> None:
        """Note a step that was logged."""
        self._last_step = step if self._last_step is None else max(step, self._last_step)

    def _end(self, status: Status) -> None:
        """Check the status; a start after this one is of another run, unless a state is loaded."""
        check_status(status)
        self._loaded = False


def opened(part: T | None, tracker: str) -> T:
    """Return what a tracker holds since ``start``; RuntimeError where it holds nothing."""
    if part is None:
        raise RuntimeError(f"the {tracker} tracker is not open: call start(run) before logging")
    return part
