"""Which run a tracker goes on with, and up to which step what it has is to be kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loggers.base import RunInfo, Status, check_status
from loggers.resumable import ResumableTracker

__all__ = ["ContinuingTracker"]


class ContinuingTracker(ResumableTracker):
    """A resumable tracker that may be used for one run after the other.

    Args:
        all_ranks: log on every process rather than on the main one only.
    """

    def __init__(self, *, all_ranks: bool = False) -> None:
        super().__init__(all_ranks=all_ranks)
        self._loaded = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the run that ``state`` names."""
        super().load_state_dict(state)
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
