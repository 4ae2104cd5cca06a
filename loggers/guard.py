"""One tracker behind a wall: its exceptions are counted and reported, never the run's."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from loggers.base import RunInfo, Status, Tracker

_logger = logging.getLogger("accel_callbacks.trackers")


class Row(NamedTuple):
    """One call of ``log``: Unix time, step, flat values."""

    time: float
    step: int
    values: dict[str, Any]


@dataclass(frozen=True)
class TrackerReport:
    """How one tracker of a hub has fared.

    Args:
        rows: calls of ``log`` that it took.
        dropped: calls of ``log`` that it lost, to its own errors or after it was disabled.
        failures: exceptions that its methods raised.
        disabled: whether the hub has stopped calling it.
        last_error: the newest exception as text, or None.

    >>> TrackerReport(rows=3).failures
    0
    """

    rows: int = 0
    dropped: int = 0
    failures: int = 0
    disabled: bool = False
    last_error: str | None = None


class GuardedTracker:
    """Calls one tracker, holds the rows it has not had yet, and keeps the count of failures."""

    def __init__(self, tracker: Tracker, max_failures: int, report: bool) -> None:
        self.tracker = tracker
        self.pending: deque[Row] = deque()
        self.broken = False  # could not start, so its tool's object does not exist
        self._max_failures = max_failures
        self._log = _logger.warning if report else _logger.debug  # strict hubs raise instead
        self._takes_time = "time" in inspect.signature(tracker.log).parameters
        self._streaks: dict[str, int] = {}
        self._open = False
        self._disabled = False
        self._rows = self._dropped = self._failures = 0
        self._last_error: str | None = None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the tracker and return its result, or the exception it raised."""
        try:
            result = getattr(self.tracker, method)(*args, **kwargs)
        except Exception as error:
            self._failed(method, error)
            return error
        self._streaks.pop(method, None)
        return result

    def call_open(self, method: str, *args: Any) -> Any:
        """Like `call`; does nothing and returns None where the tracker is disabled or closed."""
        return self.call(method, *args) if self._open and not self._disabled else None

    def start(self, run: RunInfo) -> Any:
        """Start the tracker; one that cannot start is disabled."""
        error = self.call("start", run)
        self._open = not isinstance(error, Exception)
        self.broken = self._disabled = not self._open
        return error

    def deliver(self) -> list[Exception]:
        """Give the tracker its pending rows, then flush it; return what it raised.

        A row leaves the queue before the call: an interrupt in the middle of it never doubles it.
        """
        errors: list[Any] = []
        while self.pending:
            row = self.pending.popleft()
            if self._disabled or not self._open:
                self._dropped += 1
                continue
            timed = {"time": row.time} if self._takes_time else {}
            errors.append(self.call("log", dict(row.values), row.step, **timed))
            lost = isinstance(errors[-1], Exception)
            self._dropped += lost
            self._rows += not lost
        errors.append(self.call_open("flush"))
        return [error for error in errors if isinstance(error, Exception)]

    def finish(self, status: Status) -> Any:
        """Finish the tracker once if it ever started, disabled or not, so that it lets go."""
        was_open, self._open = self._open, False
        return self.call("finish", status) if was_open else None

    def report(self) -> TrackerReport:
        """Return the counts."""
        return TrackerReport(
            rows=self._rows,
            dropped=self._dropped,
            failures=self._failures,
            disabled=self._disabled,
            last_error=self._last_error,
        )

    def _failed(self, method: str, error: Exception) -> None:
        """Count a failure; say so at the first, and when it is the last one that is borne."""
        self._failures += 1
        self._last_error = f"{method}: {type(error).__name__}: {error}"
        # By method: a flush that does nothing and succeeds must not excuse a log that never does.
        self._streaks[method] = self._streaks.get(method, 0) + 1
        if self._failures == 1:
            fate = "it is off for this run" if method == "start" else "this call is lost"
            self._log(
                "tracker %r failed in %s: %s: %s. Training goes on; %s. "
                "Later failures are only counted (see report()); strict=True raises them.",
                self.tracker.name,
                method,
                type(error).__name__,
                error,
                fate,
                exc_info=error,
            )
        if self._streaks[method] >= self._max_failures and not self._disabled:
            self._disabled = True
            self._log(
                "tracker %r is disabled for the rest of the run after %d failures of %s in a row "
                "(last: %s). Fix it and resume, or leave it out of the trackers.",
                self.tracker.name,
                self._streaks[method],
                method,
                error,
            )
