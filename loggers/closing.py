"""Waiting for the trackers' threads, never for longer than was said."""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

from loggers.base import Status
from loggers.items import Reply
from loggers.queue import Pump
from loggers.worker import Writer

__all__ = ["answers", "close_all"]

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
