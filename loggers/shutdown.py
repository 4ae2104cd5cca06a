"""What the methods of a hub share: its threads, its warnings, its errors."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from loggers.base import RunInfo, Tracker
from loggers.choosing import ConfiguredTracker
from loggers.closing import answers
from loggers.config import TrackerConfig
from loggers.guard import Guard
from loggers.items import Reply
from loggers.queue import Pump
from loggers.worker import Writer

__all__ = ["HubParts", "by_name"]


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
