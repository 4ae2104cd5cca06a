"""What the built-in trackers share: they go on with the same run after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loggers.base import Tracker

__all__ = ["ResumableTracker"]


class ResumableTracker(Tracker):
    """A tracker whose state is the id of its run and the last step that it logged.

    Args:
        all_ranks: log on every process rather than on the main one only.
    """

    def __init__(self, *, all_ranks: bool = False) -> None:
        self.main_process_only = not all_ranks
        self._run_id: str | None = None
        self._last_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the run id and the last step that was logged."""
        return {"run_id": self._run_id, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the run that ``state`` names."""
        self._run_id = state.get("run_id")
        self._last_step = state.get("last_step")
