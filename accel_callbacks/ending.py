"""SIGTERM, while trackers are open: the script unwinds, so that they are told how it ended."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

__all__ = ["EndOnSigterm"]

_EXIT_CODE = 128 + signal.SIGTERM


class EndOnSigterm(AbstractContextManager["EndOnSigterm"]):
    """Turn SIGTERM into ``SystemExit(143)`` in the main thread, where nobody else handles it.

    A handler that the script or a callback has set, before or afterwards, is left alone. A forked
    process that inherits this one ends as if it were not there.

    Attributes:
        received: a SIGTERM has come.

    Example:
        >>> import os, signal
        >>> from accel_callbacks.ending import EndOnSigterm
        >>> try:
        ...     with EndOnSigterm():
        ...         os.kill(os.getpid(), signal.SIGTERM)
        ... except SystemExit as end:
        ...     print(end.code)
        143
    """

    def __init__(self) -> None:
        self.received = False
        self._active = False
        self._before: Any = signal.SIG_DFL
        self._pid = 0

    def __enter__(self) -> EndOnSigterm:
        before = signal.getsignal(signal.SIGTERM)
        free = before is signal.SIG_DFL or _owner(before) is not None
        if free and threading.current_thread() is threading.main_thread():
            self._active, self._before, self._pid = True, before, os.getpid()
            signal.signal(signal.SIGTERM, self._end)
        return self

    def __exit__(self, *error: object) -> None:
        """Put back what was there, unless another handler has come since."""
        self._active = False
        mine = _owner(signal.getsignal(signal.SIGTERM)) is self
        if mine and threading.current_thread() is threading.main_thread():
            before = self._before
            while (owner := _owner(before)) is not None and not owner._active:
                before = owner._before
            signal.signal(signal.SIGTERM, before)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = True
        raise SystemExit(_EXIT_CODE)


def _owner(handler: Any) -> EndOnSigterm | None:
    """The object whose handler this is, if it is one of ours."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, EndOnSigterm) else None
