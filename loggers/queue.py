"""The hub's thread: values off the device, NaN policy, hand-over."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from loggers.config import NanPolicy, TrackerConfig
from loggers.values import to_host
from loggers.worker import MEDIA_BYTES, Media, Pending, Row, Writer

__all__ = ["Pump", "apply_nan_policy"]

_logger = logging.getLogger("accel_callbacks.trackers")
_FULL = 256  # rows that are worth a delivery before its time
_STALLED_AFTER = 30.0  # seconds in one call of a tracker


def apply_nan_policy(
    rows: Iterable[tuple[int, dict[str, Any]]], policy: NanPolicy
) -> tuple[str, int, float] | None:
    """Drop non-finite values where the policy is "skip"; return the first as (name, step, value).

    Args:
        rows: steps and flat values, read from their devices; changed in place.
        policy: "keep" does not even look.

    >>> row = {"loss": float("nan"), "lr": 0.1}
    >>> apply_nan_policy([(3, row)], "skip"), row
    (('loss', 3, nan), {'lr': 0.1})
    """
    first: tuple[str, int, float] | None = None
    if policy == "keep":
        return first
    for step, values in rows:
        bad = [
            name
            for name, value in values.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        if bad and first is None:
            first = (bad[0], step, values[bad[0]])
        if policy == "skip":
            for name in bad:
                del values[name]
    return first


class Pump:
    """Takes what the training thread logs; `put` only appends.

    Args:
        writers: where it all goes.
        config: options of the hub.
        on_error: told what a strict hub raises.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        config: TrackerConfig,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.lost = 0  # rows that gave way because a device did not answer
        self._writers = writers
        self._config = config
        self._on_error = on_error
        self._inbox: deque[Row | Pending] = deque()
        self._bytes_in = self._bytes_out = 0  # of media; the second is this thread's own
        self._orders: deque[Callable[[], None]] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._interval = config.flush_every_s
        self._eager = self._interval <= 0
        self._thread: threading.Thread | None = None
        self._over = False
        self._said: set[str] = set()

    def begin(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._work, name="tracker hub", daemon=True)
        self._thread.start()

    # --- on the training thread -----------------------------------------------------------------

    def put(self, row: Row) -> None:
        """Take a row; the oldest gives way where the thread does not come to it."""
        inbox = self._inbox
        inbox.append(row)
        held = len(inbox)
        if self._eager or held % _FULL == 0:
            self._tokens.put(None)
        if held > self._config.max_buffer:
            self._drop_oldest()

    def put_media(self, pending: Pending) -> None:
        """Take a picture, a table, ..., to be converted on this thread."""
        waiting = self._bytes_in - self._bytes_out
        if waiting and waiting + pending.size > MEDIA_BYTES:  # one alone may be of any size
            self.lost += 1
            self._say(
                "media",
                "%d MiB of pictures and other media wait, and the newest are dropped from now on. "
                "Training goes on; log fewer at a time, or smaller ones",
                waiting >> 20,
            )
            return
        self._bytes_in += pending.size
        self._inbox.append(pending)
        if self._eager or self._bytes_in - self._bytes_out > MEDIA_BYTES // 4:
            self._tokens.put(None)

    def ask(self, order: Callable[[], None]) -> None:
        """Do something on the thread after what was taken so far has been handed on."""
        self._orders.append(order)
        self._tokens.put(None)

    def end(self) -> None:
        """End the thread after what was asked so far."""

        def stop() -> None:
            self._over = True

        self.ask(stop)

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def has_media(self) -> bool:
        """Whether any picture, table, ... was taken."""
        return self._bytes_in > 0

    def waiting(self) -> int:
        """Return how much was taken and not handed on."""
        return len(self._inbox)

    def _drop_oldest(self) -> None:
        try:
            item = self._inbox.popleft()
        except IndexError:  # the thread was faster
            return
        self._bytes_in -= item.size if isinstance(item, Pending) else 0
        self.lost += 1
        self._say(
            "device",
            "%d values wait for their device, and the oldest are dropped from now on. "
            "Training goes on; a larger max_buffer keeps more",
            self._config.max_buffer,
        )

    # --- on its own thread ----------------------------------------------------------------------

    def _work(self) -> None:
        timeout = _STALLED_AFTER if self._eager else self._interval
        while not self._over:
            with suppress(Empty):
                self._tokens.get(timeout=min(timeout, threading.TIMEOUT_MAX))
            order = self._orders.popleft() if self._orders else None
            try:
                self._hand_on()
            except Exception as error:  # this thread must not die: all trackers depend on it
                self._on_error(error)
                self._say("bug", "handing values on failed: %r", error)
            if order is not None:
                order()
            for writer in self._writers:
                writer.guard.note_stall(_STALLED_AFTER)

    def _hand_on(self) -> None:
        """Read what was taken so far with one copy per device, and queue it for the trackers."""
        taken: list[Row | Pending] = []
        for _ in range(len(self._inbox)):
            try:
                taken.append(self._inbox.popleft())
            except IndexError:  # it gave way to newer ones
                break
        if not taken:
            return
        rows = [item for item in taken if isinstance(item, Row)]
        for problem in to_host([row.values for row in rows]):
            self._say("device", "values were lost: their device failed (%s)", problem)
        self._look_for_nan(rows)
        ready = [item if isinstance(item, Row) else self._converted(item) for item in taken]
        items = [item for item in ready if item is not None and not _is_empty(item)]
        for writer in self._writers:
            writer.put(items)

    def _converted(self, pending: Pending) -> Media | None:
        self._bytes_out += pending.size
        try:
            return pending.convert()
        except Exception as error:
            self._on_error(error)
            self.lost += 1
            self._say(f"convert {error}", "a picture (or other media) was lost: %s", error)
            return None

    def _look_for_nan(self, rows: list[Row]) -> None:
        policy = self._config.nan_policy
        first = apply_nan_policy(((row.step, row.values) for row in rows), policy)
        if first is None:
            return
        name, step, value = first
        if policy == "raise":
            self._on_error(FloatingPointError(f"{name!r} is {value} at step {step}"))
        else:
            self._say("nan", "%r is %s at step %d: %s", name, value, step, _FATE[policy])

    def _say(self, kind: str, text: str, *args: Any) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _logger.warning(text + " (said once)", *args)


def _is_empty(item: Row | Media) -> bool:
    """Say whether nothing of a row is left."""
    return isinstance(item, Row) and not item.values


_FATE = {"skip": "such values are left out", "warn": "such values are recorded as they are"}
