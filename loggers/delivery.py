"""Giving rows and media to one tracker: what it is to get, at which step, how often it is tried."""

from __future__ import annotations

import time
from collections.abc import Callable

from loggers.guard import Guard
from loggers.items import Media, Row

__all__ = ["Delivery"]

_TRIES = 3  # of one row, so that a row which can never be written does not cost the others
_BACK_OFF = (0.1, 0.5, 2.0, 10.0)  # seconds before the next try, by failures in a row


class Delivery:
    """Calls a tracker's ``log`` and media methods, on its thread.

    Args:
        guard: the tracker.
        takes: which names it is to get.

    Attributes:
        rows: calls of ``log`` that succeeded.
        hurry: the run is ending, so there are no pauses between tries; set by other threads.
        abandoned: the time is up, so nothing is given any more; set by other threads.
    """

    def __init__(self, guard: Guard, takes: Callable[[str], bool]) -> None:
        self.rows = 0
        self.hurry = self.abandoned = False
        self._guard = guard
        self._takes = takes
        self._last_step: int | None = None

    def give(self, item: Row | Media) -> bool:
        """Give one row or picture, ...; False if it is lost."""
        if self.abandoned or self._guard.disabled:
            return False
        return self._give_row(item) if isinstance(item, Row) else self._give_media(item)

    def _give_row(self, row: Row) -> bool:
        """Give one row, more than once if need be; False if it is lost."""
        values = {name: value for name, value in row.values.items() if self._takes(name)}
        if not values:
            return True
        step, extra = self._step(row.step), (row.extra or {}).get(self._guard.tracker.name)
        for attempt in range(_TRIES):
            error = self._guard.log_row(values, step, row.time, extra)
            if not isinstance(error, BaseException):
                self.rows += 1
                return True
            if self._guard.disabled or self.abandoned or attempt == _TRIES - 1:
                break
            self._pause(_BACK_OFF[min(self._guard.streak("log"), len(_BACK_OFF)) - 1])
        return False

    def _give_media(self, item: Media) -> bool:
        args = item.args
        if item.by_name and isinstance(args[0], str):
            if not self._takes(args[0]):
                return True
        elif item.by_name:
            chosen = {name: value for name, value in args[0].items() if self._takes(name)}
            if not chosen:
                return True
            args = (chosen, *args[1:])
        if item.step is not None:
            args = (*args, self._step(item.step))
        kwargs = {**item.kwargs, **item.extra.get(self._guard.tracker.name, {})}
        result = self._guard.call(f"log_{item.kind}", *args, **kwargs)
        return not isinstance(result, BaseException)

    def _step(self, step: int) -> int:
        """Return the step to log at: not below the last, where the tool would drop that."""
        if self._guard.tracker.needs_rising_steps and self._last_step is not None:
            step = max(step, self._last_step)
        self._last_step = step
        return step

    def _pause(self, seconds: float) -> None:
        """Wait before another try; shortly where the run is ending."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.hurry:
            time.sleep(0.02)
