"""Closing all trackers of a hub within a time limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

from loggers.base import Status
from loggers.queue import Pump
from loggers.worker import Reply, Writer

__all__ = ["close_all", "wait_for_replies"]

_GRACE = 5.0  # seconds that the trackers still get when closing them is interrupted
_DELIVERY_SHARE = 0.8  # of the time in which rows are delivered; the rest is for closing


def close_all(pump: Pump, writers: Sequence[Writer], status: Status, seconds: float) -> None:
    """Deliver what is left and finish every tracker, all concurrently.

    Rows that are left when most of the time is over are dropped, so that the tool is still closed.
    A tracker that does not return is left to its daemon thread. An interrupt (Ctrl-C) shortens the
    wait, and is raised after it.
    """
    begin, reply = time.monotonic(), Reply()
    try:
        pump.submit(lambda: _request_finish(writers, status, reply))
        pump.end()
        late = _wait(writers, status, reply, begin, seconds)
    except BaseException:
        now = time.monotonic()
        left = min(_GRACE, max(begin + seconds - now, 0.0))
        _report(_wait(writers, status, reply, now, left), left)
        raise
    _report(late, seconds)


def wait_for_replies(reply: Reply, count: int, deadline: float) -> dict[str, Any]:
    """Collect the replies of ``count`` trackers by name, until a time of ``time.monotonic``."""
    got: dict[str, Any] = {}
    while len(got) < count:
        try:
            name, result = reply.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            break
        got[name] = result
    return got


def _request_finish(writers: Sequence[Writer], status: Status, reply: Reply) -> None:
    for writer in writers:
        writer.finish(status, reply)


def _wait(
    writers: Sequence[Writer], status: Status, reply: Reply, begin: float, seconds: float
) -> list[Writer]:
    """Return the writers that did not finish in time."""
    count = sum(not writer.finished for writer in writers)
    wait_for_replies(reply, count, begin + _DELIVERY_SHARE * seconds)
    late = [writer for writer in writers if not writer.finished]
    for writer in late:
        writer.abandon()
        # Requested again: if a device blocks the pump, its request never reached the writer.
        writer.finish(status, SimpleQueue())
    deadline = begin + seconds
    for writer in late:
        writer.join(max(0.0, deadline - time.monotonic()))
    return [writer for writer in late if not writer.finished]


def _report(late: Sequence[Writer], seconds: float) -> None:
    for writer in late:
        writer.report_unfinished(seconds)
