"""Warnings of several ranks: one that all of them raise is shown once, by rank 0.

They are raised on all ranks as ever, so filters and recorders see them. What Python would print on
a rank other than 0 is held back for a moment, in which rank 0 may show the same.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from accel_callbacks.collectives import BoundedStore
from accel_callbacks.distributed.heartbeat import current_heartbeat
from accel_callbacks.recurrence import digest

__all__ = ["show_held_warnings", "show_warnings_once", "show_warnings_plainly"]

_KEY = "warning"  # "{_KEY}/{digest}" in the store: the first rank that has shown it; 0 overrides
_GRACE = 1.0  # seconds that a warning waits for rank 0
_POLLING = 0.05
_MOST = 1_000  # different ones of a rank that are compared; later ones are shown by each rank
_MODULES = ("warnings", "_py_warnings")  # of Python's own functions


class _RankWarnings:
    """A replacement of ``warnings.showwarning`` while ranks share a store."""

    def __init__(self, rank: int, store: BoundedStore, store_outlives: bool) -> None:
        self.store, self.store_outlives = store, store_outlives
        self._rank, self._process, self._seen = rank, os.getpid(), set[str]()
        self._held: dict[str, str] = {}  # text to print, by digest
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self.python_shows = warnings.showwarning

    def show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Print a warning on rank 0; on others hold it back, as long as rank 0 may print it."""
        if os.getpid() != self._process:  # a fork, such as a worker of a DataLoader
            self.python_shows(message, category, filename, lineno, file, line)
            return
        place = f"{category.__name__} {Path(filename).name}:{lineno} {message}"
        name = digest(place)
        known = name in self._seen
        shared = file is None and (known or len(self._seen) < _MOST)
        if shared:
            self._seen.add(name)
        if self._rank == 0 or not shared:
            self.python_shows(message, category, filename, lineno, file, line)
            if shared and not known:
                self.store.post(lambda store: store.set(f"{_KEY}/{name}", "0"))
            return
        text = warnings.formatwarning(message, category, filename, lineno, line)
        with self._lock:
            self._held[name] = f"[RANK {self._rank}] {text}"
            timer, known = self._timer, self._timer is not None
            if timer is None:
                timer = self._timer = threading.Timer(_GRACE, self.settle)
                timer.daemon = True
        if not known:
            try:
                timer.start()
            except RuntimeError:  # the interpreter ends, and starts no thread any more
                self.settle()

    def settle(self, *, patience: float = 0.0, asks: bool = True) -> None:
        """Print the warnings that are held back and that no other rank has shown.

        Args:
            patience: seconds to wait for rank 0 to show them.
            asks: whether the store is there to be asked.
        """
        with self._lock:
            held, self._held = self._held, {}
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
        if not held:
            return
        keys, deadline = [f"{_KEY}/{name}" for name in held], time.monotonic() + patience
        rank = str(self._rank)
        first_ranks = [rank] * len(keys)
        with suppress(Exception):  # without the store each rank shows its own
            while asks and None in self.store.read(keys) and time.monotonic() < deadline:
                time.sleep(_POLLING)
            if asks:  # compare_set returns the rank that was the first to show it
                first_ranks = [self.store.compare_set(key, "", rank).decode() for key in keys]
        shown = zip(held.values(), first_ranks, strict=True)
        texts = [text for text, first in shown if first == rank]
        if sys.stderr is not None:
            with suppress(OSError):
                sys.stderr.write("".join(texts))


# Of the default group. Global, as the default group is, and as warnings are.
_current: _RankWarnings | None = None


def show_warnings_once(rank: int, store: BoundedStore, store_outlives: bool) -> None:
    """Show a warning of all ranks on rank 0 only, unless the script has replaced showwarning.

    Args:
        rank: of this process.
        store: of the default group.
        store_outlives: True if a launcher serves the store, and not rank 0.
    """
    global _current
    if _current is not None and _current.store is store:
        return
    show_warnings_plainly()
    # A script may log them, or record them in a block.
    shows = (getattr(warnings, name, None) for name in ("showwarning", "_showwarnmsg_impl"))
    if any(getattr(function, "__module__", None) not in _MODULES for function in shows):
        return
    _current = _RankWarnings(rank, store, store_outlives)
    warnings.showwarning = _current.show
    atexit.register(show_warnings_plainly)


def show_held_warnings() -> None:
    """Show now what is held back and rank 0 has not shown, because the ranks leave the group."""
    if _current is not None:
        _current.settle()


def show_warnings_plainly() -> None:
    """Show the warnings of this process as Python does, because it has left the group, or ends."""
    global _current
    shared, _current = _current, None
    if shared is None:
        return
    atexit.unregister(show_warnings_plainly)
    # A process that ends with an error may be ended by its launcher, and says at once what it has.
    failed = getattr(sys, "last_value", None) is not None
    watch = current_heartbeat()
    alone = watch is not None and watch.lost is not None and watch.lost.rank == 0
    shared.settle(patience=0.0 if failed or alone else _GRACE, asks=shared.store_outlives)
    if warnings.showwarning == shared.show:
        warnings.showwarning = shared.python_shows
