"""One tracker behind a wall: its exceptions are counted and reported, never the run's."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loggers.base import MEDIA, Tracker, media

_logger = logging.getLogger("accel_callbacks.trackers")

_MEDIA_METHODS = frozenset(f"log_{kind}" for kind in MEDIA)


@dataclass(frozen=True)
class TrackerReport:
    """How one tracker of a hub has fared.

    Args:
        rows: calls of ``log`` that it took.
        dropped: calls of ``log`` and pictures, texts, ... that it lost: to its own errors, because
            it did not keep up, or after it was disabled.
        failures: exceptions that its methods raised, and calls that did not come back in time.
        disabled: whether the hub has stopped calling it.
        last_error: the newest failure as text, or None.

    >>> TrackerReport(rows=3).failures
    0
    """

    rows: int = 0
    dropped: int = 0
    failures: int = 0
    disabled: bool = False
    last_error: str | None = None


class Guard:
    """Calls one tracker and keeps the count of its failures; what it raises is returned.

    Args:
        tracker: what is called.
        max_failures: failures of one method in a row that are borne.
        on_error: told each failure; raises nothing.
        report: say so on the log; strict hubs raise instead.
    """

    def __init__(
        self,
        tracker: Tracker,
        max_failures: int,
        on_error: Callable[[BaseException], None],
        *,
        report: bool,
    ) -> None:
        self.tracker = tracker
        self.kinds = media(tracker)
        self.open = self.disabled = False
        self.broken = False  # could not start, so its tool's object does not exist
        self.failures = 0
        self.last_error: str | None = None
        self.busy: tuple[str, float] | None = None  # the call that is going on, and since when
        self.warn = _logger.warning if report else _logger.debug
        self._max_failures = max_failures
        self._on_error = on_error
        self._takes_time = "time" in _keywords(tracker, "log")[0]
        self._streaks: dict[str, int] = {}
        self._off: set[str] = set()  # media that fail each time; scalars go on
        self._said_stalled = False

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the tracker and return its result, or the exception it raised."""
        if method in self._off:
            return RuntimeError(f"{method} has failed too often")
        self.busy = (method, time.monotonic())
        try:
            result = getattr(self.tracker, method)(*args, **kwargs)
        except BaseException as error:  # a tool that exits the process from its thread, too
            self.busy = None
            self._failed(method, error)
            return error
        self.busy = None
        self._streaks.pop(method, None)
        return result

    def call_open(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Like `call`; does nothing and returns None where the tracker is disabled or closed."""
        usable = self.open and not self.disabled
        return self.call(method, *args, **kwargs) if usable else None

    def log_row(self, values: Mapping[str, Any], step: int, at: float, extra: Any) -> Any:
        """Call ``log`` with the keywords that this tracker takes."""
        kwargs = dict(extra or {})
        if self._takes_time:
            kwargs["time"] = at
        return self.call("log", dict(values), step, **kwargs)

    def unknown_keywords(self, method: str, names: Mapping[str, Any]) -> list[str]:
        """Return those that ``log``, or a method for media that the tracker has, does not take."""
        if method != "log" and method.removeprefix("log_") not in self.kinds:
            return []
        known, any_other = _keywords(self.tracker, method)
        return [] if any_other else [name for name in names if name not in known]

    def streak(self, method: str) -> int:
        """Return how often this method has failed since it last succeeded."""
        return self._streaks.get(method, 0)

    def is_busy_for(self, seconds: float) -> bool:
        """Say whether the call that is going on has taken longer than this."""
        busy = self.busy
        return busy is not None and time.monotonic() - busy[1] > seconds

    def note_stall(self, after: float) -> None:
        """Report once a call that has been going on for longer than ``after`` seconds."""
        busy = self.busy
        if busy is None or self._said_stalled or not self.is_busy_for(after):
            return
        self._said_stalled = True
        self.warn(
            "tracker %r has not returned from %s for %.0f s. Training goes on; what it has not "
            "taken waits, and the oldest rows give way when there are too many.",
            self.tracker.name,
            busy[0],
            after,
        )

    def gave_up(self, what: str, lost: int, advice: str) -> None:
        """Count and report a call that did not come back in time."""
        where = f" (busy in {self.busy[0]})" if self.busy else ""
        cost = f"; {lost} rows are lost" if lost else ""
        text = f"tracker {self.tracker.name!r} {what}{where}{cost}. {advice}"
        self.failures += 1
        self.last_error = text
        self.warn("%s", text)
        self._on_error(TimeoutError(text))

    def _failed(self, method: str, error: BaseException) -> None:
        """Count a failure; say so at the first, and when it is the last one that is borne."""
        self.failures += 1
        self.last_error = f"{method}: {type(error).__name__}: {error}"
        # By method: a flush that does nothing and succeeds must not excuse a log that never does.
        self._streaks[method] = self._streaks.get(method, 0) + 1
        if self.failures == 1:
            self._say_first(method, error)
        if self._streaks[method] >= self._max_failures:
            self._switch_off(method, error)
        self._on_error(error)

    def _say_first(self, method: str, error: BaseException) -> None:
        fate = {"start": "it is off for this run", "log": "the row is tried again"}
        self.warn(
            "tracker %r failed in %s: %s: %s. Training goes on; %s. "
            "Later failures are only counted (see report()); strict=True raises them.",
            self.tracker.name,
            method,
            type(error).__name__,
            error,
            fate.get(method, "this call is lost"),
            exc_info=error,
        )

    def _switch_off(self, method: str, error: BaseException) -> None:
        """Stop calling a kind of media, or the whole tracker."""
        if method in _MEDIA_METHODS:
            what = f"gets no more {method.removeprefix('log_')}"
            self._off.add(method)
        elif not self.disabled:
            what, self.disabled = "is disabled for the rest of the run", True
        else:
            return
        self.warn(
            "tracker %r %s after %d failures of %s in a row (last: %s). Fix it and resume, or "
            "leave it out of the trackers.",
            self.tracker.name,
            what,
            self._streaks[method],
            method,
            error,
        )


def _keywords(tracker: Tracker, method: str) -> tuple[frozenset[str], bool]:
    """Return the keywords that a method names beside values and step, and whether it takes any."""
    parameters = list(inspect.signature(getattr(tracker, method)).parameters.values())
    own = 4 if method == "log_table" else 2  # what the hub gives by position
    named = [p for p in parameters[own:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return frozenset(p.name for p in named), any_keyword
