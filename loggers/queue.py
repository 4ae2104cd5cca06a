"""The hub's thread: read values from their devices, apply the NaN policy, pass them on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from loggers.config import NanPolicy, TrackerConfig
from loggers.values import to_host
from loggers.worker import MEDIA_BYTES, Losses, Media, Pending, Permission, Row, Writer

__all__ = ["Pump", "apply_nan_policy"]

_logger = logging.getLogger("accel_callbacks.trackers")
_EAGER_S = 0.5  # seconds after which trackers are reminded of their rows in a hub that is eager
_FULL = 256  # rows that are delivered before the interval is over
_STALLED_AFTER = 30.0  # seconds in one call of a tracker
_POLL = 0.001  # seconds
_SLOWED_AFTER = 10.0  # seconds in all that the loop has waited
_NAN_OUTCOMES = {"skip": "such values are dropped", "warn": "such values are recorded as they are"}


class Pump:
    """Takes rows and media from the training thread, and passes them to the trackers' threads.

    Args:
        writers: the trackers' threads.
        config: options of the hub.
        on_error: called with the errors that a strict hub raises.
        permission: to write, asked also while nothing is logged.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        config: TrackerConfig,
        on_error: Callable[[BaseException], None],
        permission: Permission,
    ) -> None:
        self._permission = permission
        self.lost = Losses()  # before they reached any tracker
        self._writers = writers
        # In a hub without lossless trackers `put` never waits.
        self._lossless = [writer for writer in writers if writer.guard.tracker.lossless]
        self._behind = False  # rows of a lossless tracker wait, so the next `put` does
        self._passed = 0  # rows and media that were read from their devices
        self._stalled_at = -1  # the value of `_passed` when waiting for a device was given up
        self._waited = 0.0
        self._config = config
        self._max_buffer = config.max_buffer
        self._on_error = on_error
        self._inbox: deque[Row | Pending] = deque()
        # Without a lock: the training thread writes the first, this one the second.
        self._bytes_in = self._bytes_out = 0  # of media
        self._requests: deque[Callable[[], None]] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._interval = config.flush_every_s
        self._eager = self._interval <= 0
        self._batch = 1 if self._eager else _FULL  # rows of which the thread is told
        self._thread: threading.Thread | None = None
        self._over = False
        self._warned: set[str] = set()

    def begin(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: this process may start no more threads.
        """
        self._thread = threading.Thread(target=self._work, name="tracker hub", daemon=True)
        self._thread.start()

    # --- on the training thread -----------------------------------------------------------------

    def put(self, row: Row) -> None:
        """Append a row; wait for lossless trackers, drop the oldest row if there are none."""
        inbox = self._inbox
        inbox.append(row)
        waiting = len(inbox)
        if not waiting % self._batch:
            self._tokens.put(None)
        if self._behind or waiting > self._max_buffer:
            self._make_room()

    def put_media(self, pending: Pending) -> None:
        """Append media, to be converted on this thread."""
        waiting = self._bytes_in - self._bytes_out
        full = waiting + pending.size > MEDIA_BYTES
        if self._lossless and (full or self._behind):
            self._wait_for_room()
            waiting = self._bytes_in - self._bytes_out
            full = waiting > MEDIA_BYTES // 2
        if waiting and full:  # a single item may be of any size
            self.lost.count(pending)
            self._warn_once(
                "media",
                "%d MiB of images and other media wait, and the newest are dropped from now on. "
                "Training continues; log fewer at a time, or smaller ones",
                waiting >> 20,
            )
            return
        self._bytes_in += pending.size
        self._inbox.append(pending)
        if self._eager or self._bytes_in - self._bytes_out > MEDIA_BYTES // 4:
            self._tokens.put(None)

    def submit(self, request: Callable[[], None]) -> None:
        """Run a function on this thread, after what was logged so far has been passed on."""
        self._requests.append(request)
        self._tokens.put(None)

    def end(self) -> None:
        """End the thread after the requests so far."""

        def stop() -> None:
            self._over = True

        self.submit(stop)

    @property
    def has_media(self) -> bool:
        """True once any media were logged."""
        return self._bytes_in > 0

    def waiting(self) -> int:
        """Return the number of items not passed on yet."""
        return len(self._inbox)

    def _make_room(self) -> None:
        """Wait for lossless trackers; drop the oldest row if this did not help."""
        if self._lossless:
            self._wait_for_room()
        if len(self._inbox) > self._config.max_buffer:
            self._drop_oldest()

    def _wait_for_room(self) -> None:
        """Wait until the queues of lossless trackers, and the one of this thread, are half empty.

        What makes no progress for ``stall_timeout_s`` is no longer waited for: a tracker for the
        rest of the run, a device until it is read again.
        """
        begin = since = time.monotonic()
        seen = self._progress()
        self._tokens.put(None)
        while self._is_full():
            # Polled: a signal handler may interrupt this, and log, at any point.
            time.sleep(_POLL)
            now, progress = time.monotonic(), self._progress()
            if progress != seen:
                seen, since = progress, now
            elif now - since >= self._config.stall_timeout_s:
                self._give_up()
        self._behind = False
        self._waited += time.monotonic() - begin
        if self._waited > _SLOWED_AFTER:
            self._warn_once(
                "slowed",
                "log has waited %.0f s for %s, which lose no rows. Log less often to train faster",
                self._waited,
                ", ".join(writer.name for writer in self._lossless),
            )

    def _is_full(self) -> bool:
        """Return whether lossless trackers, or the rows that they are to get, are awaited."""
        running = self._thread is not None and self._thread.is_alive() and not self._over
        awaited = [writer for writer in self._lossless if writer.is_lossless] if running else []
        behind = any(writer.is_behind(0.5) for writer in awaited)
        return bool(awaited) and (behind or self._is_inbox_full())

    def _is_inbox_full(self) -> bool:
        """Return whether the queue is more than half full, and was not given up as it is."""
        many = len(self._inbox) > self._config.max_buffer // 2
        large = self._bytes_in - self._bytes_out > MEDIA_BYTES // 2
        return (many or large) and self._passed != self._stalled_at

    def _progress(self) -> tuple[int, ...]:
        """Return counts that change while anything is written or read from a device."""
        return (self._passed, *(writer.done for writer in self._lossless))

    def _give_up(self) -> None:
        """Stop waiting for what makes no progress."""
        if self._is_inbox_full():
            self._stalled_at = self._passed
        for writer in self._lossless:
            if writer.is_lossless and writer.is_behind(0.5):
                writer.give_up(self._config.stall_timeout_s)

    def _drop_oldest(self) -> None:
        try:
            item = self._inbox.popleft()
        except IndexError:  # the thread emptied the queue meanwhile
            return
        self._bytes_in -= item.size if isinstance(item, Pending) else 0
        self.lost.count(item)
        self._warn_once(
            "device",
            "%d values wait for their device, and the oldest are dropped from now on. "
            "Training continues; a larger max_buffer keeps more",
            self._config.max_buffer,
        )

    # --- on its own thread ----------------------------------------------------------------------

    def _work(self) -> None:
        timeout = _EAGER_S if self._eager else self._interval
        while not self._over:
            with suppress(Empty):
                self._tokens.get(timeout=min(timeout, threading.TIMEOUT_MAX))
            # Taken before the rows, so that the request sees all that was logged before it.
            request = self._requests.popleft() if self._requests else None
            try:
                self._pass_on()
            except Exception as error:  # this thread must not die: all trackers depend on it
                self._on_error(error)
                self._warn_once("bug", "passing values on failed: %r", error)
            if request is not None:
                request()
            self._permission.is_given()
            for writer in self._writers:
                writer.remind()
                writer.guard.warn_stall(_STALLED_AFTER)

    def _pass_on(self) -> None:
        """Read all waiting values with one copy per device, and queue them for the trackers."""
        waiting: list[Row | Pending] = []
        for _ in range(len(self._inbox)):
            try:
                waiting.append(self._inbox.popleft())
            except IndexError:  # dropped meanwhile
                break
        if not waiting:
            return
        rows = [item for item in waiting if isinstance(item, Row)]
        for problem in to_host([row.values for row in rows]):
            self._warn_once("device", "values were lost: their device failed (%s)", problem)
        self._check_finite(rows)
        ready = [item if isinstance(item, Row) else self._convert(item) for item in waiting]
        # A row is empty if its device failed, or if the NaN policy dropped its values.
        items = [i for i in ready if i is not None and not (isinstance(i, Row) and not i.values)]
        for writer in self._writers:
            writer.put(items)
        self._passed += len(waiting)
        self._behind = any(writer.is_lossless and writer.is_behind() for writer in self._lossless)

    def _convert(self, pending: Pending) -> Media | None:
        self._bytes_out += pending.size
        try:
            return pending.convert()
        except Exception as error:
            self._on_error(error)
            self.lost.count(pending)
            self._warn_once(f"convert {error}", "an image (or other media) was lost: %s", error)
            return None

    def _check_finite(self, rows: list[Row]) -> None:
        policy = self._config.nan_policy
        first = apply_nan_policy(((row.step, row.values) for row in rows), policy)
        if first is None:
            return
        name, step, value = first
        if policy == "raise":
            self._on_error(FloatingPointError(f"{name!r} is {value} at step {step}"))
        else:
            outcome = _NAN_OUTCOMES[policy]
            self._warn_once("nan", "%r is %s at step %d: %s", name, value, step, outcome)

    def _warn_once(self, kind: str, text: str, *args: Any) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _logger.warning(text + " (warned once)", *args)


def apply_nan_policy(
    rows: Iterable[tuple[int, dict[str, Any]]], policy: NanPolicy
) -> tuple[str, int, float] | None:
    """Drop non-finite values where the policy is "skip"; return the first as (name, step, value).

    Args:
        rows: steps and flat values, read from their devices; changed in place.
        policy: with "keep" the values are not inspected.

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
