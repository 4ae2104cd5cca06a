"""One thread a tracker: its queue, retries, guard; what travels in it."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from loggers.base import MEDIA, RunInfo, Status, Tracker, media

__all__ = ["MEDIA_BYTES", "Delivery", "Media", "Pending", "Reply", "Row", "Writer"]

_logger = logging.getLogger("accel_callbacks.trackers")

_MEDIA_METHODS = frozenset(f"log_{kind}" for kind in MEDIA)
MEDIA_BYTES = 1 << 28
_TRIES = 3  # of one row, so that a row which can never be written does not cost the others
_BACK_OFF = (0.1, 0.5, 2.0, 10.0)  # seconds before the next try, by failures in a row
_FLUSH_BACK_OFF = (1.0, 5.0, 30.0, 60.0)  # seconds, by failures in a row: a disk that is full, say


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


"""What pictures, tables, ... may hold while they wait, on their way to all and to one tracker."""

Reply = SimpleQueue[tuple[str, Any]]
"""Where the threads put (tracker, result); its methods are safe in a signal handler."""


class Row(NamedTuple):
    """One call of ``log``: Unix time, step, flat values, and keywords by tracker."""

    time: float
    step: int
    values: dict[str, Any]
    extra: Mapping[str, Mapping[str, Any]] | None = None


class Media(NamedTuple):
    """One call of ``log_images`` and so on, ready for the trackers.

    ``by_name`` says that the first argument has the name, or names, that filters look at;
    ``extra`` has keywords by tracker; ``size`` is about how many bytes it holds.
    """

    kind: str
    step: int | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool
    extra: Mapping[str, Mapping[str, Any]]
    size: int


class Pending(NamedTuple):
    """What such a call has left on its device: about how many bytes, and how to convert it."""

    size: int
    convert: Callable[[], Media]


class Delivery:
    """Calls a tracker's ``log`` and media methods, on its thread.

    Args:
        guard: the tracker.
        takes: which names it is to get.

    Attributes:
        rows: calls of ``log`` that succeeded.
        hurry: the run is ending, so there are no pauses between tries; set by other threads.
        abandoned: the time is up, so nothing is given any more; set by other threads.
    """

    def __init__(self, guard: Guard, takes: Callable[[str], bool]) -> None:
        self.rows = 0
        self.hurry = self.abandoned = False
        self._guard = guard
        self._takes = takes
        self._last_step: int | None = None

    def give(self, item: Row | Media) -> bool:
        """Give one row or picture, ...; False if it is lost."""
        if self.abandoned or self._guard.disabled:
            return False
        return self._give_row(item) if isinstance(item, Row) else self._give_media(item)

    def _give_row(self, row: Row) -> bool:
        """Give one row, more than once if need be; False if it is lost."""
        values = {name: value for name, value in row.values.items() if self._takes(name)}
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
            self._pause(_BACK_OFF[min(self._guard.streak("log"), len(_BACK_OFF)) - 1])
        return False

    def _give_media(self, item: Media) -> bool:
        args = item.args
        if item.by_name and isinstance(args[0], str):
            if not self._takes(args[0]):
                return True
        elif item.by_name:
            chosen = {name: value for name, value in args[0].items() if self._takes(name)}
            if not chosen:
                return True
            args = (chosen, *args[1:])
        if item.step is not None:
            args = (*args, self._step(item.step))
        kwargs = {**item.kwargs, **item.extra.get(self._guard.tracker.name, {})}
        result = self._guard.call(f"log_{item.kind}", *args, **kwargs)
        return not isinstance(result, BaseException)

    def _step(self, step: int) -> int:
        """Return the step to log at: not below the last, where the tool would drop that."""
        if self._guard.tracker.needs_rising_steps and self._last_step is not None:
            step = max(step, self._last_step)
        self._last_step = step
        return step

    def _pause(self, seconds: float) -> None:
        """Wait before another try; shortly where the run is ending."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.hurry:
            time.sleep(0.02)


class Writer:
    """Owns a tracker's thread. Only `put` and the methods that ask are called from others.

    Args:
        guard: the tracker.
        takes: which names it is to get.
        run: what it is told when it starts.
        max_rows: that wait for it; the oldest give way. None of it is waited for.
    """

    def __init__(
        self, guard: Guard, takes: Callable[[str], bool], run: RunInfo, max_rows: int
    ) -> None:
        self.guard = guard
        self.state: dict[str, Any] | None = None  # the last one known
        self.finished = False
        self._delivery = Delivery(guard, takes)
        self._run = run
        self._max_rows = max_rows
        self._queue: deque[Row | Media | Callable[[], None]] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over = self._dirty = False
        self._flush_after = 0.0
        # Each counter has one thread that writes it.
        self._lost = self._overflowed = self._left = 0
        self._bytes_in = self._bytes_out = 0  # of media

    @property
    def name(self) -> str:
        """The tracker's."""
        return self.guard.tracker.name

    # --- asked by other threads -----------------------------------------------------------------

    def begin(self, reply: Reply) -> None:
        """Start the thread, and the tracker on it."""
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._order(reply, self._start)
        self._thread.start()

    def put(self, items: list[Row | Media]) -> None:
        """Queue rows and media; called by one thread only."""
        for item in items:
            if isinstance(item, Row):
                self._queue.append(item)
            elif item.kind in self.guard.kinds:
                self._put_media(item)
        for _ in range(len(self._queue) - self._max_rows):  # orders stay, however many they are
            self._drop_oldest()
        self._tokens.put(None)

    def ask(self, method: str, reply: Reply, *args: Any) -> None:
        """Call a method after what is queued, and put (tracker, result) into ``reply``."""

        def act() -> Any:
            result = self.guard.call_open(method, *args)
            self._dirty = True
            self._flush()
            return result

        self._order(reply, act)

    def ask_graph(self, reply: Reply, in_time: list[bool], model: Any, inputs: Any) -> None:
        """Let the tracker trace a model, unless ``in_time[0]`` has become False by then."""

        def act() -> Any:
            if not in_time[0]:
                return None
            torch = sys.modules.get("torch")
            with torch.no_grad() if torch is not None else nullcontext():  # it is one of a thread
                return self.guard.call_open("log_graph", model, inputs)

        self._order(reply, act)

    def ask_flush(self, reply: Reply) -> None:
        """Deliver what is queued, and make it visible to readers."""
        self._order(reply, self._flush)

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Let the tracker, which is not started yet, go on with the run of ``state``."""
        self.state = dict(state)
        self.guard.call("load_state_dict", state)

    def ask_state(self, reply: Reply) -> None:
        """Flush, and renew `state`."""
        self._order(reply, self._renew_state)

    def finish(self, status: Status, reply: Reply) -> None:
        """Deliver what is queued and close the tracker; without pauses from now on."""
        self._delivery.hurry = True
        self._order(reply, lambda: self._finish(status))

    def abandon(self) -> None:
        """Drop what is queued: the time is up."""
        self._delivery.hurry = self._delivery.abandoned = True
        self._tokens.put(None)

    def waiting(self) -> int:
        """Return how many rows and media are queued."""
        return len(self._queue)

    def give_up(self, seconds: float) -> None:
        """Count what a tracker that hangs has not taken."""
        self._left = len(self._queue)
        self.guard.gave_up(
            f"did not finish within {seconds:g} s",
            self._left,
            "Its thread ends with the process; finish_timeout_s is how long to wait.",
        )

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def report(self) -> TrackerReport:
        """Return the counts."""
        guard = self.guard
        return TrackerReport(
            rows=self._delivery.rows,
            dropped=self._lost + self._overflowed + self._left,
            failures=guard.failures,
            disabled=guard.disabled,
            last_error=guard.last_error,
        )

    def _order(self, reply: Reply, act: Callable[[], Any]) -> None:
        self._queue.append(lambda: reply.put((self.name, act())))
        self._tokens.put(None)

    def _put_media(self, item: Media) -> None:
        waiting = self._bytes_in - self._bytes_out
        if waiting and waiting + item.size > MEDIA_BYTES:  # one alone may be of any size
            self._note_overflow()
        else:
            self._bytes_in += item.size
            self._queue.append(item)

    def _drop_oldest(self) -> None:
        """Let the oldest row or picture, ... give way; what was asked stays in front."""
        orders: list[Callable[[], None]] = []
        with suppress(IndexError):  # its thread was faster
            while callable(item := self._queue.popleft()):
                orders.append(item)
            self._bytes_in -= item.size if isinstance(item, Media) else 0
            self._note_overflow()
        self._queue.extendleft(reversed(orders))

    def _note_overflow(self) -> None:
        self._overflowed += 1
        if self._overflowed == 1:
            self.guard.warn(
                "tracker %r does not keep up: %d rows wait for it, and the oldest are dropped from "
                "now on (of pictures and other media the newest). Training goes on; log less "
                "often, or give it a larger max_buffer.",
                self.name,
                len(self._queue),
            )

    # --- on the tracker's own thread ------------------------------------------------------------

    def _work(self) -> None:
        while not self._over:
            self._tokens.get()
            for _ in range(len(self._queue)):  # what comes meanwhile has a token of its own
                try:
                    item = self._queue.popleft()
                except IndexError:  # it gave way to newer ones
                    break
                self._handle(item)
            self._flush()

    def _handle(self, item: Row | Media | Callable[[], None]) -> None:
        if callable(item):
            self._flush()
            item()
            return
        self._bytes_out += item.size if isinstance(item, Media) else 0
        self._dirty = True
        self._lost += not self._delivery.give(item)

    def _start(self) -> Any:
        error = self.guard.call("start", self._run)
        self.guard.open = not isinstance(error, BaseException)
        self.guard.broken = self.guard.disabled = not self.guard.open
        if self.guard.open:
            self._renew_state()
        return error

    def _flush(self) -> Any:
        """Flush if there is something to flush; what failed is tried again with the next rows."""
        if not self._dirty or (time.monotonic() < self._flush_after and not self._delivery.hurry):
            return None
        result = self.guard.call_open("flush")
        self._dirty = isinstance(result, BaseException)
        if self._dirty:
            pause = _FLUSH_BACK_OFF[min(self.guard.streak("flush"), len(_FLUSH_BACK_OFF)) - 1]
            self._flush_after = time.monotonic() + pause
        return result

    def _renew_state(self) -> Any:
        state = self.guard.call_open("state_dict")
        if isinstance(state, dict):
            self.state = state
        return state

    def _finish(self, status: Status) -> Any:
        """Close the tracker once if it ever started, disabled or not, so that it lets go."""
        self._over = True
        result = None
        if self.guard.open:
            self._renew_state()
            self.guard.open = False
            result = self.guard.call("finish", status)
        self.finished = True
        return result
