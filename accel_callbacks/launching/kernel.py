"""What a launch changes in the process that it is called from, and puts back."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["left_as_it_was"]

_STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_LAUNCHER_LOGS = (
    "torch.distributed.elastic",
    "torch.distributed.launcher",
    "torch.multiprocessing",
)


@contextmanager
def left_as_it_was() -> Iterator[None]:
    """Around torch's launcher: its signal handlers, its log lines and its processes end with it.

    Raises:
        KeyboardInterrupt: a Ctrl-C came, which torch's launcher turns into an error of its own.

    Example:
        >>> import signal
        >>> from accel_callbacks.launching.kernel import left_as_it_was
        >>> before = signal.getsignal(signal.SIGTERM)
        >>> with left_as_it_was():
        ...     _ = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        >>> signal.getsignal(signal.SIGTERM) == before
        True
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    received: int | None = None
    with ExitStack() as undo:
        undo.enter_context(_own_handlers())
        undo.enter_context(_no_child_left())
        undo.enter_context(_quiet_launcher())
        try:
            yield
        except SignalException as stop:
            received = int(stop.sigval)
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    if received is not None:
        os.kill(os.getpid(), received)  # for the handler that was there before
        raise SystemExit(128 + received)


@contextmanager
def _own_handlers() -> Iterator[None]:
    numbers = [getattr(signal, name) for name in _STOPS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # one that C code has set cannot be set again
                    signal.signal(number, handler)


@contextmanager
def _no_child_left() -> Iterator[None]:
    """A second Ctrl-C breaks off the wait for processes that end slowly: then they are killed."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
            child.join()


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Torch's launcher logs what is raised anyway; Python 3.12 warns of each fork with threads."""
    known = [
        one
        for name, one in logging.root.manager.loggerDict.items()
        if name.startswith(_LAUNCHER_LOGS) and isinstance(one, logging.Logger) and not one.disabled
    ]
    quiet = [] if "LOGLEVEL" in os.environ else known
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        for one in quiet:
            one.disabled = True
        try:
            yield
        finally:
            for one in quiet:
                one.disabled = False
