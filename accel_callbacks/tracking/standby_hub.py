"""The hub of a process that logs nothing, until the one that does is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from loggers import TrackerHub

__all__ = ["LoggedRow", "StandbyHub"]

_KEPT = 1000  # rows; what a killed process had not written yet is the last second of them


class LoggedRow(NamedTuple):
    """The arguments of one `put`."""

    flat: dict[str, Any]
    step: int
    log_kwargs: Mapping[str, Mapping[str, Any]] | None


class StandbyHub(TrackerHub):
    """A hub without trackers, which keeps the newest rows.

    Attributes:
        rows: the oldest first.
    """

    rows: deque[LoggedRow]

    def start(self) -> None:
        """Start without trackers."""
        self.rows = deque(maxlen=_KEPT)
        super().start()

    def put(
        self,
        flat: dict[str, Any],
        step: int,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Keep a row."""
        self.rows.append(LoggedRow(flat, step, log_kwargs))
