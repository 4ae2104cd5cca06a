"""Seconds spent on training itself, and on nothing that interrupts it."""

from __future__ import annotations

import time

__all__ = ["TrainingClock"]


class TrainingClock:
    """Counts seconds of training; it stands still while something else is done.

    Example:
        >>> from accel_callbacks.callbacks.training_clock import TrainingClock
        >>> clock = TrainingClock()
        >>> clock.go(waited=0.0)
        >>> clock.stop(waited=0.0)
        >>> clock.read() == clock.read()
        True
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._waited: float | None = None

    def go(self, waited: float) -> None:
        """Training goes on; ``waited`` is what it has waited for its data so far, in seconds."""
        if self._since is None:
            # Between a save and the next batch, only the wait for that batch is training.
            self._seconds += 0.0 if self._waited is None else waited - self._waited
            self._since = time.perf_counter()

    def stop(self, waited: float, at: float | None = None) -> None:
        """Something else begins, or has begun ``at`` an earlier ``time.perf_counter()``."""
        if self._since is None:
            return
        early = 0.0 if at is None else max(time.perf_counter() - max(at, self._since), 0.0)
        self._seconds, self._since, self._waited = self.read() - early, None, waited

    def read(self) -> float:
        """Seconds so far."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._seconds + running
