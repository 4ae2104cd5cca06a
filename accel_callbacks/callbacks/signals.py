"""Signals that ask a process to go: caught once, and said to whoever looks."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

from accel_callbacks.errors import nearest

__all__ = ["SignalCatcher", "read_signals"]

_STUCK = 2.0  # seconds that a main thread may need to get to its signal
_DEADLY = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP")  # that parents send to end their children


def read_signals(names: Iterable[str | int]) -> tuple[signal.Signals, ...]:
    """Signals by name or number; names that only other systems have are left out.

    Raises:
        ValueError: no system has such a signal, or it cannot be caught.

    Example:
        >>> from accel_callbacks.callbacks.signals import read_signals
        >>> [one.name for one in read_signals(["SIGTERM"])]
        ['SIGTERM']
    """
    found = []
    for name in names:
        if not isinstance(name, str):
            found.append(signal.Signals(name))
            continue
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name} cannot be caught: ask the cluster for SIGTERM or SIGUSR1.")
        one = getattr(signal, name, None)
        if isinstance(one, signal.Signals):
            found.append(one)
        elif name not in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT"):  # those Windows lacks
            known = [each.name for each in signal.Signals]
            raise ValueError(f"{name!r} is no signal.{nearest(name, known)}")
    return tuple(found)


class SignalCatcher:
    """Catches the first of each signal; a later one has the effect that it had before.

    Args:
        signals: those to catch.
        patience: seconds after the first signal; then the process ends by it after all.

    Attributes:
        caught: the signal that came first, or ``None``.
        echo: seconds in which the same signal is taken for the first one once more. Clusters send
            theirs to a launcher and to its processes, and the launcher passes it on.

    Example:
        >>> import signal
        >>> from accel_callbacks.callbacks.signals import SignalCatcher, read_signals
        >>> catcher = SignalCatcher(read_signals(["SIGTERM"]))
        >>> catcher.install()
        True
        >>> signal.raise_signal(signal.SIGTERM)
        >>> catcher.caught.name
        'SIGTERM'
        >>> catcher.restore()
    """

    echo = 5.0

    def __init__(self, signals: Iterable[signal.Signals], patience: float | None = None) -> None:
        self._signals = tuple(signals)
        self._patience = patience
        self._before: dict[int, Any] = {}
        self._came: dict[int, float] = {}
        self._process = 0
        self._given_up = False
        self._deadline: threading.Timer | None = None
        self.caught: signal.Signals | None = None

    def install(self) -> bool:
        """Catch from here on; False outside of the main thread, which alone can."""
        self.restore()
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "signals are caught in the main thread only: they will end this process at once.",
                stacklevel=3,
            )
            return False
        self._process = os.getpid()
        for one in self._signals:
            # What was set outside of Python is reported as None, and cannot be set again.
            self._before[one] = signal.signal(one, self._handle) or signal.SIG_DFL
        return True

    def restore(self) -> None:
        """Catch no more: each signal has the effect that it had before."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._came.clear()
        for number in list(self._before):
            self._restore_one(number)

    def _restore_one(self, number: int) -> None:
        before = self._before.pop(number, signal.SIG_DFL)
        if signal.getsignal(number) == self._handle:  # else somebody has taken it over since
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Only note it: this may interrupt anything."""
        now = time.monotonic()
        if os.getpid() != self._process:
            # A forked child, say a worker of a loader: it works until its parent ends it.
            if signal.Signals(number).name in _DEADLY:
                self._end_by(number)
        elif number not in self._came:
            self._came[number] = now
            self.caught = self.caught or signal.Signals(number)
            if self._patience is not None and self._deadline is None:
                self._deadline = threading.Timer(self._patience, self._give_up, (number,))
                self._deadline.daemon = True
                self._deadline.start()
        elif now - self._came[number] >= self.echo:
            self._end_by(number)

    def _end_by(self, number: int) -> None:
        """The signal has the effect that it had before."""
        self._given_up = True
        self._restore_one(number)
        os.kill(os.getpid(), number)

    def _give_up(self, number: int) -> None:
        """On a thread: the patience is over."""
        self._came[number] = -math.inf
        os.kill(self._process, number)
        time.sleep(_STUCK)
        if not self._given_up:  # the main thread does not come back to Python: no handler will run
            os._exit(128 + number)
