"""What a Checkpoint remembers: where it saved last, and how good what it saved is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_callbacks.callbacks.monitor import Monitor

__all__ = ["Place", "SaveNotes"]

Place = tuple[int, int, bool]  # steps, epochs done, whether an epoch is open


class SaveNotes:
    """The place of the last save, and the monitored values: fresh, saved, best.

    Args:
        monitor: the metric that scores checkpoints, if there is one.

    Attributes:
        saved_at: steps, epochs done and whether an epoch was open at the last save.
        fresh_score: logged since the last save; it scores the next checkpoint and no later one.
        saved_score: of the last save.
        best_score: of all saves.
        best_path: of the best save, durable or on its way.

    Example:
        >>> from accel_callbacks.callbacks.checkpoint_notes import SaveNotes
        >>> from accel_callbacks.callbacks.monitor import Monitor
        >>> notes = SaveNotes(Monitor("loss"))
        >>> notes.read({"loss": 0.5})
        >>> notes.improved
        True
        >>> notes.take((100, 1, False), "runs/step-00000100")
        {'score': {'monitor': 'loss', 'value': 0.5}}
    """

    def __init__(self, monitor: Monitor | None = None) -> None:
        self.monitor = monitor
        self.saved_at: Place | None = None
        self._fresh: Any = None  # a tensor stays on its device until the score is needed
        self.saved_score: float | None = None
        self.best_score: float | None = None
        self.best_path: str | None = None

    def read(self, metrics: Mapping[str, Any]) -> None:
        """Note the monitored value, if it was logged."""
        if self.monitor is not None:
            value = metrics.get(self.monitor.name)
            self._fresh = self._fresh if value is None else value

    @property
    def fresh_score(self) -> float | None:
        """Logged since the last save; reading it waits for the device."""
        if self._fresh is not None:
            self._fresh = float(self._fresh)
        return self._fresh

    @fresh_score.setter
    def fresh_score(self, value: float | None) -> None:
        self._fresh = value

    @property
    def improved(self) -> bool:
        """Whether the fresh value is better than all that was saved."""
        if self.monitor is None or self.fresh_score is None:
            return False
        return self.monitor.is_better(self.fresh_score, than=self.best_score)

    @property
    def saved_step(self) -> int | None:
        """The step of the last save."""
        return None if self.saved_at is None else self.saved_at[0]

    def take(self, place: Place, path: str) -> dict[str, Any]:
        """Note that this place is saved now; returns what its manifest says of its score."""
        score = self._score_at(place[0])
        if self.improved:
            self.best_score, self.best_path = self.fresh_score, path
        self.fresh_score, self.saved_score, self.saved_at = None, score, place
        if score is None or self.monitor is None:
            return {}
        return {"score": {"monitor": self.monitor.name, "value": score}}

    def undo(self, before: dict[str, Any]) -> None:
        """The save has failed: as before it, but for a value that was logged since."""
        fresh = self.fresh_score
        self.load_state_dict(before)
        if fresh is not None:
            self.fresh_score = fresh

    def _score_at(self, step: int) -> float | None:
        """The fresh score; where a step is saved again, the better one of its scores."""
        fresh, earlier = self.fresh_score, self.saved_score
        if self.monitor is None or earlier is None or step != self.saved_step:
            return fresh
        better = fresh is not None and self.monitor.is_better(fresh, than=earlier)
        return fresh if better else earlier

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        names = ("saved_at", "fresh_score", "saved_score", "best_score", "best_path")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore in place."""
        saved_at = state_dict["saved_at"]
        self.saved_at = None if saved_at is None else (saved_at[0], saved_at[1], saved_at[2])
        self.fresh_score = state_dict["fresh_score"]
        self.saved_score = state_dict["saved_score"]
        self.best_score = state_dict["best_score"]
        self.best_path = state_dict["best_path"]
