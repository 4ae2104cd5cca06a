"""Daemon threads that train: ended in order before the interpreter ends.

The interpreter ends a daemon thread wherever it is, by unwinding its stack. In a call of torch,
such as a backward or a collective, that aborts the whole process.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
import time
from weakref import WeakSet

from accel_callbacks.distributed.abort import abort_all_groups

__all__ = ["end_daemon_threads", "register_daemon_thread"]

_PATIENCE = 5.0  # seconds for a thread to end, which it does at its next line of Python
_threads: WeakSet[threading.Thread] = WeakSet()


def register_daemon_thread() -> None:
    """End the current thread in order when the process exits, if it is a daemon."""
    thread = threading.current_thread()
    if not thread.daemon or thread in _threads:
        return
    _threads.add(thread)
    _set_exit_hook()


@functools.cache  # once a process
def _set_exit_hook() -> None:
    atexit.register(end_daemon_threads)


def end_daemon_threads() -> None:
    """Raise SystemExit in the daemon threads that train, and wait a few seconds for their end.

    Collectives in which they wait for other ranks are aborted.
    """
    alive = [thread for thread in list(_threads) if thread.is_alive()]
    for thread in alive:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
    # After the exceptions are set: a thread in a collective sees its own only once that has failed.
    if alive:
        abort_all_groups()
    deadline = time.monotonic() + _PATIENCE
    for thread in alive:
        thread.join(max(0.0, deadline - time.monotonic()))
