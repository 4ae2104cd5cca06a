"""The thread of one tracker: queue, delivery with retries, and isolation of its errors."""

from __future__ import annotations

import errno
import inspect
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from loggers.base import MEDIA, RunInfo, Scalar, Status, Tracker, media, takes_batches

__all__ = [
    "MEDIA_BYTES",
    "Delivery",
    "Guard",
    "Losses",
    "Media",
    "Pending",
    "Permission",
    "Reply",
    "Row",
    "TrackerReport",
    "Writer",
]

MEDIA_BYTES = 1 << 28
"""Bytes that images, tables, ... may occupy in the hub's queue, and in that of each tracker."""

_MEDIA_METHODS = frozenset(f"log_{kind}" for kind in (*MEDIA, "objects"))
_BATCH = 256  # rows in one call of ``log_rows``
_LOST_ROWS = "tracker/lost_rows"
_TRIES = 3  # of one row, so that a row that can never be written does not block the others
_BACK_OFF = (0.1, 0.5, 2.0, 10.0)  # seconds before the next try, by failures in a row
_FLUSH_BACK_OFF = (1.0, 5.0, 30.0, 60.0)  # the same for flush, e.g. while a disk is full
_logger = logging.getLogger("accel_callbacks.trackers")

Reply = SimpleQueue[tuple[str, Any]]
"""Queue of (tracker, result) filled by the threads; its methods are safe in a signal handler."""


@dataclass(frozen=True)
class TrackerReport:
    """Counts and status of one tracker of a hub.

    Args:
        rows: calls of ``log`` that succeeded.
        dropped: calls of ``log`` and media methods that were lost: to the tracker's own errors,
            because it did not keep up, or after it was disabled.
        failures: exceptions that its methods raised, and calls that did not return in time.
        disabled: whether the hub has stopped calling it.
        last_error: the latest failure as text, or None.
        lost_rows: calls of ``log`` among ``dropped``. If there are any, the last row of the
            tracker has their number under ``tracker/lost_rows``, if it could be written.

    Example:
        >>> TrackerReport(rows=3).failures
        0
    """

    rows: int = 0
    dropped: int = 0
    failures: int = 0
    disabled: bool = False
    last_error: str | None = None
    lost_rows: int = 0


class Row(NamedTuple):
    """One call of ``log``: Unix time, step, flat values, keywords by tracker, and the only one."""

    time: float
    step: int
    values: dict[str, Any]
    extra: Mapping[str, Mapping[str, Any]] | None = None
    only: str | None = None


class Media(NamedTuple):
    """One call of a media method, converted for the trackers.

    ``by_name`` is True if the first argument is, or maps, the names that filters apply to;
    ``extra`` has keywords by tracker; ``size`` is the approximate size in bytes; ``only`` is the
    tracker that gets it, None for all.
    """

    kind: str
    step: int | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool
    extra: Mapping[str, Mapping[str, Any]]
    size: int
    only: str | None = None


class Pending(NamedTuple):
    """A media call whose values are still on their device: size in bytes, and the conversion."""

    size: int
    convert: Callable[[], Media]


@dataclass
class Losses:
    """Counts rows and media that were lost; of one thread only, as there is no lock."""

    rows: int = 0
    media: int = 0

    def count(self, item: Row | Media | Pending) -> None:
        """Count one item."""
        if isinstance(item, Row):
            self.rows += 1
        else:
            self.media += 1


class Permission:
    """The permission to write that the user of a hub may withdraw; asked on all its threads.

    Args:
        before_write: raises once nothing more may be written; None always permits.
        on_refused: called once, with the error that it raised.
    """

    def __init__(
        self,
        before_write: Callable[[], None] | None = None,
        on_refused: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._before_write = before_write
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._refused = False

    def is_given(self) -> bool:
        """Return whether the hub may write; False for good once it was False."""
        if self._before_write is None or self._refused:
            return not self._refused
        try:
            self._before_write()
        except Exception as error:
            with self._lock:
                first, self._refused = not self._refused, True
            if first:
                self._on_refused(error)
        return not self._refused


class Writer:
    """Owns a tracker's thread, and queues rows, media and requests for it.

    No public method but `load_state` and `join` waits for the tracker.

    Args:
        guard: calls the tracker.
        takes: filter of the names that it receives; None for all.
        run: passed to the tracker's ``start``.
        max_rows: rows that wait for it; beyond, the oldest are dropped, or the hub waits.
        permission: to give it anything.

    Attributes:
        done: rows, media and requests that the tracker was given.
    """

    def __init__(
        self,
        guard: Guard,
        takes: Callable[[str], bool] | None,
        run: RunInfo,
        max_rows: int,
        permission: Permission,
    ) -> None:
        self.guard = guard
        self._permission = permission
        self.state: dict[str, Any] | None = None  # the last known one
        self.finished = False
        self.done = 0
        self._gave_up = False
        self._in_flight: Sequence[Row | Media] = ()  # what the tracker is being given
        self._last_step = 0
        self._delivery = Delivery(guard, takes)
        self._run = run
        self._max_rows = max_rows
        # Without a lock: each call of a deque is atomic.
        self._queue: deque[Row | Media | Callable[[], None]] = deque()
        # One token wakes the thread; rows themselves are in the deque, from which the oldest can
        # be dropped.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over = self._dirty = False
        self._flushed = 0  # rows that the tracker had at its last complete flush
        self._flush_after = 0.0
        # Not delivered, overflowed, left at the end: each is counted by one thread.
        self._lost, self._overflowed, self._left = Losses(), Losses(), Losses()
        self._bytes_in = self._bytes_out = 0  # of media

    @property
    def name(self) -> str:
        """The tracker's name."""
        return self.guard.tracker.name

    @property
    def is_lossless(self) -> bool:
        """Whether the hub waits for this tracker: not one that has ended, or that was given up."""
        if self._gave_up or not self.guard.tracker.lossless:
            return False
        return self._thread is not None and self._thread.is_alive() and not self._over

    def is_behind(self, share: float = 1.0) -> bool:
        """Return whether more than a share of what may wait for the tracker does."""
        waiting = self._bytes_in - self._bytes_out
        return len(self._queue) > share * self._max_rows or waiting > share * MEDIA_BYTES

    # --- called by other threads ----------------------------------------------------------------

    def begin(self, reply: Reply) -> None:
        """Start the thread, and the tracker on it.

        Raises:
            RuntimeError: this process may start no more threads.
        """
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._thread.start()
        self._submit(reply, self._start)

    def put(self, items: list[Row | Media]) -> None:
        """Queue rows and media; called by one thread only."""
        for item in items:
            if item.only is not None and item.only != self.name:
                continue
            if isinstance(item, Row):
                self._queue.append(item)
                self._last_step = max(self._last_step, item.step)
            elif item.kind in self.guard.kinds:
                self._put_media(item)
        if not self.is_lossless:
            for _ in range(len(self._queue) - self._max_rows):  # requests are never dropped
                self._drop_oldest()
        self._tokens.put(None)

    def request_call(self, method: str, reply: Reply, *args: Any, **kwargs: Any) -> None:
        """Call a method after what is queued, and put (tracker, result) into ``reply``."""

        def act() -> Any:
            result = self.guard.call_open(method, *args, **kwargs)
            self._dirty = True
            self._flush()
            return result

        self._submit(reply, act)

    def request_graph(self, reply: Reply, in_time: list[bool], model: Any, inputs: Any) -> None:
        """Trace a model, unless ``in_time[0]`` is False by then."""

        def act() -> Any:
            if not in_time[0]:
                return None
            torch = sys.modules.get("torch")
            # Grad mode is thread-local, so it is set here and not by the hub.
            with torch.no_grad() if torch is not None else nullcontext():
                return self.guard.call_open("log_graph", model, inputs)

        self._submit(reply, act)

    def request_flush(self, reply: Reply) -> None:
        """Deliver what is queued, and flush the tracker."""
        self._submit(reply, self._flush)

    def remind(self) -> None:
        """Wake the thread if the tracker has rows that a flush is to write."""
        if self._dirty and self._tokens.empty():
            self._tokens.put(None)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state into the tracker, which is not started yet."""
        self.state = dict(state)
        self.guard.call("load_state_dict", state)

    def request_state(self, reply: Reply) -> None:
        """Flush, and update `state`."""
        self._submit(reply, self._update_state)

    def give_up(self, seconds: float) -> None:
        """Drop the oldest rows from now on, because nothing was written for a while."""
        self._gave_up = True
        self.guard.timed_out(
            f"has written nothing for {seconds:g} s",
            0,
            f"Training waits for it no longer: the oldest of more than {self._max_rows} rows are "
            "dropped from now on. stall_timeout_s is how long to wait.",
        )

    def finish(self, status: Status, reply: Reply, lost: int = 0) -> None:
        """Deliver what is queued and close the tracker; no pauses between tries from now on.

        Args:
            status: outcome of the run.
            reply: gets (tracker, result).
            lost: rows that were lost before they reached this thread.
        """
        self._delivery.hurry = True
        self._submit(reply, lambda: self._finish(status, lost))

    def abandon(self) -> None:
        """Drop what is queued, because the time is up."""
        self._delivery.hurry = self._delivery.abandoned = True
        self._tokens.put(None)

    def report_unfinished(self, seconds: float) -> None:
        """Count and report what a tracker that hangs has left in the queue."""
        left = Losses()
        for item in (*self._in_flight, *self._queue.copy()):
            if not callable(item):
                left.count(item)
        self._left = left
        self.guard.timed_out(
            f"did not finish within {seconds:g} s",
            left.rows + left.media,
            "Its thread ends with the process; finish_timeout_s is how long to wait.",
        )

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def report(self) -> TrackerReport:
        """Return the counts."""
        guard, lost = self.guard, (self._lost, self._overflowed, self._left)
        return TrackerReport(
            rows=self._delivery.rows,
            dropped=sum(losses.rows + losses.media for losses in lost),
            lost_rows=sum(losses.rows for losses in lost),
            failures=guard.failures,
            disabled=guard.disabled,
            last_error=guard.last_error,
        )

    def _submit(self, reply: Reply, act: Callable[[], Any]) -> None:
        self._queue.append(lambda: reply.put((self.name, act())))
        self._tokens.put(None)

    def _put_media(self, item: Media) -> None:
        waiting = self._bytes_in - self._bytes_out
        full = waiting and waiting + item.size > MEDIA_BYTES  # a single item may be of any size
        if full and not self.is_lossless:
            self._count_overflow(item)
        else:
            self._bytes_in += item.size
            self._queue.append(item)

    def _drop_oldest(self) -> None:
        """Drop the oldest row or media; requests in front of it keep their places."""
        requests: list[Callable[[], None]] = []
        with suppress(IndexError):  # the thread emptied the queue meanwhile
            while callable(item := self._queue.popleft()):
                requests.append(item)
            self._bytes_in -= item.size if isinstance(item, Media) else 0
            self._count_overflow(item)
        self._queue.extendleft(reversed(requests))

    def _count_overflow(self, item: Row | Media) -> None:
        first = self._overflowed == Losses()
        self._overflowed.count(item)
        if first:
            self.guard.warn(
                "tracker %r does not keep up: %d rows wait for it, and the oldest are dropped from "
                "now on (of images and other media the newest). Training continues; log less "
                "often, or set a larger max_buffer.",
                self.name,
                len(self._queue),
            )

    # --- on the tracker's own thread ------------------------------------------------------------

    def _work(self) -> None:
        while not self._over:
            self._tokens.get()
            rows: list[Row] = []
            for _ in range(len(self._queue)):  # items that arrive meanwhile bring another token
                try:
                    item = self._queue.popleft()
                except IndexError:  # dropped meanwhile
                    break
                if isinstance(item, Row):
                    rows.append(item)
                if not isinstance(item, Row) or len(rows) == self._delivery.batch:
                    self._handle_rows(rows)
                    rows = []
                if not isinstance(item, Row):
                    self._handle(item)
            self._handle_rows(rows)
            self._flush()

    def _ask(self) -> None:
        """Give the tracker nothing more if the hub may not write; what is left is lost."""
        if self._permission.is_given():
            return
        self.guard.disabled = True
        if self.guard.open and self.guard.tracker.owns_files:
            # What waits in it for its files must not reach them, as it would in its `finish`.
            self.guard.open = False
            self._count_unflushed()

    def _handle_rows(self, rows: list[Row]) -> None:
        if rows:
            self._ask()
            # Before the call: if it hangs, these rows are reported as lost with those that wait.
            self._dirty, self._in_flight = True, rows
            self._lost.rows += self._delivery.deliver_rows(rows)
            self._in_flight = ()
            self.done += len(rows)

    def _handle(self, item: Media | Callable[[], None]) -> None:
        self._ask()
        if isinstance(item, Media):
            self._bytes_out += item.size
            self._dirty, self._in_flight = True, (item,)
            self._lost.media += not self._delivery.deliver_media(item)
            self._in_flight = ()
        else:
            # A request, such as for the state, is about what the tool has written, not buffered.
            self._flush()
            item()
        self.done += 1

    def _start(self) -> Any:
        if self.guard.disabled:  # it may write nothing any more
            return None
        error = self.guard.call("start", self._run)
        self.guard.open = not isinstance(error, BaseException)
        self._dirty = self.guard.open and self.guard.tracker.unflushed
        self.guard.broken = self.guard.disabled = not self.guard.open
        if self.guard.open:
            self._update_state()
        return error

    def _flush(self) -> Any:
        """Flush if anything was logged since; a failed or partial flush is retried later."""
        if not self._dirty or (time.monotonic() < self._flush_after and not self._delivery.hurry):
            return None
        self._ask()
        result = self.guard.call_open("flush")
        failed = isinstance(result, BaseException)
        self._dirty = failed or self.guard.tracker.unflushed
        if not self._dirty:
            self._flushed = self._delivery.rows
        if failed:
            pause = _FLUSH_BACK_OFF[min(self.guard.streak("flush"), len(_FLUSH_BACK_OFF)) - 1]
            self._flush_after = time.monotonic() + pause
        return result

    def _update_state(self) -> Any:
        state = self.guard.call_open("state_dict")
        if isinstance(state, dict):
            self.state = state
        return state

    def _finish(self, status: Status, lost: int) -> Any:
        """Close the tracker once if it ever started, even if disabled, to release its resources."""
        self._over = True
        result = None
        if self.guard.open:
            lost += self._lost.rows + self._overflowed.rows
            if lost:
                self.guard.call_open("log", {_LOST_ROWS: lost}, self._last_step)
            self._update_state()
            self.guard.open = False
            result = self.guard.call("finish", status)
            if isinstance(result, BaseException) and _is_full_disk(result):
                self._count_unflushed()
        self.finished = True
        return result

    def _count_unflushed(self) -> None:
        """Count the rows that the tracker had, and that its files will not get, as lost."""
        self._lost.rows += self._delivery.rows - self._flushed
        self._delivery.rows = self._flushed


class Delivery:
    """Calls a tracker's ``log`` and media methods, on its thread.

    Args:
        guard: calls the tracker.
        takes: filter of the names that it receives; None for all.

    Attributes:
        batch: rows that one call may have, 1 for trackers that have only ``log``.
        rows: calls of ``log`` that succeeded.
        hurry: the run is ending, so tries are not spaced out; set by other threads.
        abandoned: the time is up, so nothing more is delivered; set by other threads.
    """

    def __init__(self, guard: Guard, takes: Callable[[str], bool] | None) -> None:
        self.batch = _BATCH if takes_batches(guard.tracker) else 1
        self.rows = 0
        self.hurry = self.abandoned = False
        self._guard = guard
        self._takes = takes
        self._last_step: int | None = None

    def deliver_rows(self, rows: Sequence[Row]) -> int:
        """Deliver rows; return how many are lost."""
        if self.batch > 1 and not self._is_over() and self._deliver_batch(rows):
            return 0
        return sum(not self._deliver_row(row) for row in rows)

    def _is_over(self) -> bool:
        """Return whether nothing more is delivered."""
        return self.abandoned or self._guard.disabled

    def _deliver_batch(self, rows: Sequence[Row]) -> bool:
        """Deliver rows in one call; return False if they are to be delivered one by one."""
        name, batch = self._guard.tracker.name, []
        for row in rows:
            if row.extra and row.extra.get(name):
                return False
            values = self._filter_names(row.values)
            if values:
                batch.append((values, self._step(row.step), row.time))
        if batch and not self._guard.log_rows(batch):
            return False
        self.rows += len(batch)
        return True

    def _filter_names(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values that the tracker receives."""
        takes = self._takes
        return values if takes is None else {n: value for n, value in values.items() if takes(n)}

    def _deliver_row(self, row: Row) -> bool:
        """Deliver one row, with retries; return False if it is lost."""
        if self._is_over():
            return False
        values = self._filter_names(row.values)
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
            if _is_full_disk(error):  # as much as may wait does, so later rows wait in vain
                break
            self._pause(_BACK_OFF[min(self._guard.streak("log"), len(_BACK_OFF)) - 1])
        return False

    def deliver_media(self, item: Media) -> bool:
        """Deliver one call of a media method; return False if it is lost."""
        if self._is_over():
            return False
        args = item.args
        if item.by_name and isinstance(args[0], str):
            if not self._filter_names({args[0]: None}):
                return True
        elif item.by_name:
            values = self._filter_names(args[0])
            if not values:
                return True
            args = (values, *args[1:])
        if item.step is not None:
            args = (*args, self._step(item.step))
        kwargs = {**item.kwargs, **item.extra.get(self._guard.tracker.name, {})}
        result = self._guard.call(f"log_{item.kind}", *args, **kwargs)
        return not isinstance(result, BaseException)

    def _step(self, step: int) -> int:
        """Return the step to log at: at least the last one if the tool would drop a lower one."""
        if self._guard.tracker.needs_rising_steps and self._last_step is not None:
            step = max(step, self._last_step)
        self._last_step = step
        return step

    def _pause(self, seconds: float) -> None:
        """Wait before another try, until the run is ending at the latest."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.hurry:
            time.sleep(0.02)


class Guard:
    """Calls one tracker and counts its failures; exceptions are returned, not raised.

    Args:
        tracker: the tracker to call.
        max_failures: failures of one method in a row that are tolerated.
        on_error: called with each failure; must not raise.
        report: warn on the log; False for strict hubs, which raise instead.
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
        self.broken = False  # failed to start, so the tool's object does not exist
        self.failures = 0
        self.last_error: str | None = None
        self.busy: tuple[str, float] | None = None  # the call in progress, and its start time
        self.warn = _logger.warning if report else _logger.debug
        self._max_failures = max_failures
        self._on_error = on_error
        self._takes_time = "time" in _keywords(tracker, "log")[0]
        self._streaks: dict[str, int] = {}
        self._off: set[str] = set()  # media methods that are disabled; scalars continue
        self._warned_stall = False

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the tracker and return its result, or the exception it raised."""
        if method in self._off:
            return RuntimeError(f"{method} has failed too often")
        self.busy = (method, time.monotonic())
        try:
            result = getattr(self.tracker, method)(*args, **kwargs)
        except BaseException as error:  # also SystemExit, raised by a tool on its thread
            self.busy = None
            self._count_failure(method, error)
            return error
        self.busy = None
        self._streaks.pop(method, None)
        return result

    def call_open(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Like `call`, but do nothing and return None if the tracker is disabled or closed."""
        usable = self.open and not self.disabled
        return self.call(method, *args, **kwargs) if usable else None

    def log_row(self, values: Mapping[str, Any], step: int, at: float, extra: Any) -> Any:
        """Call ``log`` with the keywords that this tracker takes."""
        kwargs = dict(extra or {})
        if self._takes_time:
            kwargs["time"] = at
        return self.call("log", dict(values), step, **kwargs)

    def log_rows(self, rows: Sequence[tuple[Mapping[str, Scalar], int, float]]) -> bool:
        """Call ``log_rows``; return whether it did not raise.

        A failure is not counted: the rows are logged one by one then, and those that fail are.
        """
        self.busy = ("log_rows", time.monotonic())
        try:
            self.tracker.log_rows(rows)
        except BaseException as error:  # also SystemExit, as in `call`
            _logger.debug("tracker %r failed in log_rows: %r", self.tracker.name, error)
            return False
        finally:
            self.busy = None
        self._streaks.pop("log", None)
        return True

    def unknown_keywords(self, method: str, names: Mapping[str, Any]) -> list[str]:
        """Return the names that ``log``, or a media method of the tracker, does not take."""
        if method not in ("log", "log_objects") and method.removeprefix("log_") not in self.kinds:
            return []
        known, any_other = _keywords(self.tracker, method)
        return [] if any_other else [name for name in names if name not in known]

    def streak(self, method: str) -> int:
        """Return how often this method has failed since it last succeeded."""
        return self._streaks.get(method, 0)

    def is_busy_for(self, seconds: float) -> bool:
        """Return whether the call in progress has taken longer than this."""
        busy = self.busy
        return busy is not None and time.monotonic() - busy[1] > seconds

    def warn_stall(self, after: float) -> None:
        """Warn once about a call that has been in progress for longer than ``after`` seconds."""
        busy = self.busy
        if busy is None or self._warned_stall or not self.is_busy_for(after):
            return
        self._warned_stall = True
        self.warn(
            "tracker %r has not returned from %s for %.0f s. Training continues; later rows wait, "
            "and the oldest are dropped when there are too many.",
            self.tracker.name,
            busy[0],
            after,
        )

    def timed_out(self, what: str, lost: int, advice: str) -> None:
        """Count and report a call that did not return in time."""
        busy_in = f" (busy in {self.busy[0]})" if self.busy else ""
        cost = f"; {lost} rows are lost" if lost else ""
        text = f"tracker {self.tracker.name!r} {what}{busy_in}{cost}. {advice}"
        self.failures += 1
        self.last_error = text
        self.warn("%s", text)
        self._on_error(TimeoutError(text))

    def _count_failure(self, method: str, error: BaseException) -> None:
        """Count a failure; warn at the first one, and when the tracker is disabled."""
        self.failures += 1
        self.last_error = f"{method}: {type(error).__name__}: {error}"
        # Per method: a flush that succeeds must not reset the count of a log that always fails.
        self._streaks[method] = self._streaks.get(method, 0) + 1
        if self.failures == 1:
            self._warn_first(method, error)
        if self._streaks[method] >= self._max_failures and not _is_full_disk(error):
            self._disable(method, error)
        self._on_error(error)

    def _warn_first(self, method: str, error: BaseException) -> None:
        outcome = {
            "start": "it is off for this run",
            "log": "the row is retried",
            "flush": "it is tried again",
        }
        self.warn(
            "tracker %r failed in %s: %s: %s. Training continues; %s. "
            "Later failures are only counted (see report()); strict=True raises them.",
            self.tracker.name,
            method,
            type(error).__name__,
            error,
            outcome.get(method, "this call is lost"),
            exc_info=error,
        )

    def _disable(self, method: str, error: BaseException) -> None:
        """Stop calling one media method, or the tracker altogether."""
        if method in _MEDIA_METHODS:
            outcome = f"gets no more {method.removeprefix('log_')}"
            self._off.add(method)
        elif not self.disabled:
            outcome, self.disabled = "is disabled for the rest of the run", True
        else:
            return
        self.warn(
            "tracker %r %s after %d failures of %s in a row (last: %s). Fix it and resume, or "
            "remove it from the trackers.",
            self.tracker.name,
            outcome,
            self._streaks[method],
            method,
            error,
        )


def _is_full_disk(error: BaseException) -> bool:
    """Return whether there is no room on a disk, which may change while the run goes on."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _keywords(tracker: Tracker, method: str) -> tuple[frozenset[str], bool]:
    """Return a method's keywords except the values and the step, and whether it takes any name."""
    parameters = list(inspect.signature(getattr(tracker, method)).parameters.values())
    positional = 4 if method == "log_table" else 2  # passed positionally by the hub
    named = [p for p in parameters[positional:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return frozenset(p.name for p in named), any_keyword
