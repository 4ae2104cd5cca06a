"""A hub's threads: their answers, warnings, and their end within a limit."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from loggers.base import RunInfo, Status, Tracker
from loggers.config import TrackerConfig
from loggers.queue import Pump
from loggers.registry import ConfiguredTracker
from loggers.worker import Guard, Reply, Writer

__all__ = ["HubParts", "answers", "by_name", "close_all"]

_GRACE = 5.0  # seconds that the trackers still get when closing them is interrupted
_FOR_ROWS = 0.8  # share of the time in which rows are delivered; the rest is for closing


def answers(reply: Reply, count: int, deadline: float) -> dict[str, Any]:
    """Collect what ``count`` trackers answer by a time of ``time.monotonic``, by their names."""
    got: dict[str, Any] = {}
    while len(got) < count:
        try:
            name, result = reply.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            break
        got[name] = result
    return got


def close_all(pump: Pump, writers: Sequence[Writer], status: Status, seconds: float) -> None:
    """Deliver what is left and finish every tracker, all at the same time.

    Where rows are left when most of the time is over they are dropped, so that the tool is still
    closed. A tracker that does not come back is left to its thread. An interrupt shortens the
    wait, and is raised after it.
    """
    begun, reply = time.monotonic(), Reply()
    try:
        pump.ask(lambda: _finish(writers, status, reply))
        pump.end()
        late = _wait(writers, status, reply, begun, seconds)
    except BaseException:
        now = time.monotonic()
        left = min(_GRACE, max(begun + seconds - now, 0.0))
        _report(_wait(writers, status, reply, now, left), left)
        raise
    _report(late, seconds)


def _finish(writers: Sequence[Writer], status: Status, reply: Reply) -> None:
    for writer in writers:
        writer.finish(status, reply)


def _wait(
    writers: Sequence[Writer], status: Status, reply: Reply, begun: float, seconds: float
) -> list[Writer]:
    """Return the writers that are not done in time."""
    answers(reply, sum(not w.finished for w in writers), begun + _FOR_ROWS * seconds)
    late = [writer for writer in writers if not writer.finished]
    for writer in late:
        writer.abandon()
        writer.finish(status, SimpleQueue())  # where a device keeps the hub from asking
    deadline = begun + seconds
    for writer in late:
        writer.join(max(0.0, deadline - time.monotonic()))
    return [writer for writer in late if not writer.finished]


def _report(late: Sequence[Writer], seconds: float) -> None:
    for writer in late:
        writer.give_up(seconds)


class HubParts:
    """The parts that a hub holds; set once by its constructor."""

    run: RunInfo
    config: TrackerConfig
    _all: dict[str, tuple[Tracker, ConfiguredTracker]]
    _writers: list[Writer]
    _pump: Pump
    _errors: deque[BaseException]
    _warned: set[str]
    _started: bool
    _finished: bool
    _pid: int

    def _writer(self, tracker: Tracker, choice: ConfiguredTracker) -> Writer:
        """Return a tracker with its guard, its filter and its queue."""
        config = self.config
        guard = Guard(tracker, config.max_failures, self._note, report=not config.strict)
        return Writer(guard, choice.takes, self.run, config.max_buffer)

    def _note(self, error: BaseException) -> None:
        """Keep an error for the training thread, where that is to raise it."""
        asked_for = isinstance(error, FloatingPointError) and self.config.nan_policy == "raise"
        if self.config.strict or asked_for:
            self._errors.append(error)

    def _settle(self) -> None:
        """Raise the first error that was kept, and forget the others, which follow from it."""
        if self._errors:
            first = self._errors[0]
            self._errors.clear()
            raise first

    def _accepting(self, method: str) -> bool:
        """Say whether values can be taken: an error before `start`, a warning after `finish`."""
        if not self._started:
            raise RuntimeError(f"TrackerHub.{method} before start(): call start() first")
        if self._is_forked():
            return False
        if self._finished:
            self._warn_once("finished", f"{method} after finish() is ignored: the run is over")
            return False
        if self._errors:
            self._settle()
        return True

    def _is_forked(self) -> bool:
        """Say whether this is a child of the process that logs, which has none of its threads."""
        return os.getpid() != self._pid

    def _ask_all(self, ask: Callable[[Writer, Reply], None], timeout: float) -> bool:
        """Let every tracker answer after what was logged so far; say whether all did in time."""
        if not self._started or self._finished or not self._writers or self._is_forked():
            return True
        reply = Reply()
        # One that is in a call for longer than this was waited for before, and that is enough.
        asked = [writer for writer in self._writers if not writer.guard.is_busy_for(timeout)]

        def ask_each() -> None:
            for writer in asked:
                ask(writer, reply)

        self._pump.ask(ask_each)
        answered = answers(reply, len(asked), time.monotonic() + timeout)
        return len(answered) == len(self._writers)

    def _check_keywords(
        self, log_kwargs: Mapping[str, Mapping[str, object]], method: str = "log"
    ) -> None:
        """Raise for a tracker that is not there, and for a keyword that it does not take."""
        for name, keywords in log_kwargs.items():
            if name not in self._all:
                known = ", ".join(self._all) or "none"
                raise ValueError(f"log_kwargs for {name!r}, which is no tracker here: {known}")
            for writer in self._writers:
                if writer.name != name:
                    continue
                unknown = writer.guard.unknown_keywords(method, keywords)
                if unknown:
                    raise TypeError(f"{method} of tracker {name!r} takes no keyword {unknown[0]!r}")

    def _warn_once(self, kind: str, text: str) -> None:
        """Warn at the line of the script that has called the hub, or an Accelerator."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
            frame, level = frame.f_back, level + 1
        warnings.warn(f"{text} (said once)", UserWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("loggers", "accel_callbacks")


def by_name(
    made: Iterable[tuple[Tracker, ConfiguredTracker]],
) -> dict[str, tuple[Tracker, ConfiguredTracker]]:
    """Key trackers by name and refuse two of one name, whose states could not be told apart."""
    named: dict[str, tuple[Tracker, ConfiguredTracker]] = {}
    for tracker, choice in made:
        name = getattr(tracker, "name", "")
        if not isinstance(name, str) or not name:
            raise TypeError(f"tracker {tracker!r} has no name: set `name` on its class")
        if name in named:
            raise ValueError(
                f"two trackers are named {name!r}: set .name on one of them, or give it a label "
                "with configured_tracker(..., label=...)"
            )
        named[name] = (tracker, choice)
    return named
