"""One thread a tracker: takes rows and media from a bounded queue and gives them to it in order."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from queue import SimpleQueue
from typing import Any

from loggers.base import RunInfo, Status
from loggers.delivery import Delivery
from loggers.guard import Guard, TrackerReport
from loggers.items import MEDIA_BYTES, Media, Reply, Row

__all__ = ["Writer"]

_FLUSH_BACK_OFF = (1.0, 5.0, 30.0, 60.0)  # seconds, by failures in a row: a disk that is full, say


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
