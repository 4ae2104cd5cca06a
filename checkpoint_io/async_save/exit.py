"""The end of the process: saves end first, and an error that nobody asked for is not lost."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_PATIENCE = 1.0  # seconds before it is said what the process is waiting for


class Unfinished(Protocol):
    """A save that may outlive the script that started it."""

    url: str
    process: int

    @property
    def unread(self) -> BaseException | None:
        """The error that nobody has asked for."""

    def ended(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; False if the time is over first."""


# What runs in this process is a fact of the process; a forked child finds it and lets it be.
_watched: list[Unfinished] = []
_set_up = False


def watch(save: Unfinished) -> None:
    """Wait for a save before the process exits, unless it is released first."""
    global _set_up
    _watched.append(save)
    if not _set_up:
        _set_up = True
        _before_executors_close(_finish)


def release(save: Unfinished) -> None:
    """Forget a save that has ended, and whose error, if any, has been raised somewhere."""
    with suppress(ValueError):
        _watched.remove(save)


def _before_executors_close(function: Callable[[], None]) -> None:
    """Call a function when the interpreter begins to shut down, before thread pools refuse work.

    `atexit` is too late for that: uploads and name look-ups need the pools. Those register their
    own end when they are imported, and the last one registered is the first one called.
    """
    import concurrent.futures.thread  # noqa: F401

    register = getattr(threading, "_register_atexit", None)
    if register is None:  # the thread of a save keeps the process all the same
        atexit.register(function)
        return
    with suppress(RuntimeError):  # the shutdown has begun already
        register(function)


def _finish() -> None:
    """Wait for what is under way, then show the errors that nobody has seen."""
    here = [save for save in list(_watched) if save.process == os.getpid()]
    try:
        for save in here:
            if not save.ended(_PATIENCE):
                _say(f"the process ends when the save to {save.url} has; Ctrl-C gives it up")
                save.ended()
    except KeyboardInterrupt:
        _say("the save is given up; what was there before is valid, unless the new one is")
        _flush()
        os._exit(130)  # the thread of the save cannot be stopped
    errors = [(save.url, save.unread) for save in here if save.unread is not None]
    for url, error in errors:
        _say(f"the save to {url} FAILED, and the script ended without asking for its outcome:")
        traceback.print_exception(error, file=sys.stderr)
    if errors and not hasattr(sys, "last_value"):  # else the script fails by itself
        atexit.register(_fail)


def _fail() -> None:
    """Exit with a status that is not zero, which no exit handler can ask for."""
    atexit.unregister(_fail)
    atexit._run_exitfuncs()
    _flush()
    os._exit(1)


def _say(text: str) -> None:
    with suppress(Exception):
        print(f"[checkpoint_io] {text}", file=sys.stderr, flush=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
