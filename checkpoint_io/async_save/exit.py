"""Process exit: wait for pending saves first, and print errors that were not asked for."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_NOTICE_DELAY = 1.0  # seconds of waiting before the notice that names the save


class PendingSave(Protocol):
    """A save that may outlive the script that started it."""

    url: str
    process: int

    @property
    def unread(self) -> BaseException | None:
        """The error, if it was not asked for yet."""

    def ended(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the end; return whether it has ended."""


# Global, as threads belong to the process. A forked child inherits the list and ignores the saves
# of its parent.
_watched: list[PendingSave] = []
_registered = False


def watch(save: PendingSave) -> None:
    """Wait for a save at process exit, unless it is released first."""
    global _registered
    _watched.append(save)
    if not _registered:
        _registered = True
        _register_before_executors(_wait_at_exit)


def release(save: PendingSave) -> None:
    """Stop watching a save that has ended and whose error, if any, was asked for."""
    with suppress(ValueError):
        _watched.remove(save)


def _register_before_executors(function: Callable[[], None]) -> None:
    """Call a function at interpreter shutdown, before thread pools refuse work.

    `atexit` runs too late: uploads and name lookups need the pools.
    """
    # This import registers the shutdown of the pools. The last function registered is called first.
    import concurrent.futures.thread  # noqa: F401

    register = getattr(threading, "_register_atexit", None)
    if register is None:  # the thread of a save is not a daemon: the process waits for it anyway
        atexit.register(function)
        return
    with suppress(RuntimeError):  # the shutdown has already begun
        register(function)


def _wait_at_exit() -> None:
    """Wait for pending saves, then print the errors that were not asked for."""
    own = [save for save in list(_watched) if save.process == os.getpid()]
    try:
        for save in own:
            if not save.ended(_NOTICE_DELAY):
                _print(f"waiting for the save to {save.url} before exiting; Ctrl-C aborts it")
                save.ended()
    except KeyboardInterrupt:
        _print("the save is aborted; the previous checkpoint is valid, unless the new one is")
        _flush()
        os._exit(130)  # a thread cannot be stopped
    errors = [(save.url, save.unread) for save in own if save.unread is not None]
    for url, error in errors:
        _print(f"the save to {url} FAILED, and the script ended without asking for its outcome:")
        traceback.print_exception(error, file=sys.stderr)
    if errors and not hasattr(sys, "last_value"):  # an unhandled exception fails the script anyway
        atexit.register(_fail)


def _fail() -> None:
    """Exit with status 1, after the remaining exit handlers, which cannot set a status."""
    atexit.unregister(_fail)
    atexit._run_exitfuncs()
    _flush()
    os._exit(1)


def _print(text: str) -> None:
    with suppress(Exception):
        print(f"[checkpoint_io] {text}", file=sys.stderr, flush=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
