"""Where a thread is, for errors and for the watch over calls that hang."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

__all__ = ["SaveCalls", "call_of_torch", "frame_of", "place_of"]

_HERE = Path(__file__).parents[2]
_OURS = tuple(f"{_HERE / name}{os.sep}" for name in ("accel_callbacks", "checkpoint_io", "loggers"))
_SAVING = tuple(f"{_HERE / 'checkpoint_io' / name}{os.sep}" for name in ("saver", "storage"))
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Frames of code that is neither the user's nor ours. Installed packages are in purelib.
_LIBRARIES = (_TORCH, *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib")), "<")


def place_of(thread: threading.Thread) -> str:
    """Describe where a thread is: the line of the user's code, and the call of ours or torch's.

    Example:
        >>> import threading
        >>> from accel_callbacks.distributed.stack import place_of
        >>> place_of(threading.Thread())
        ''
    """
    frame, inner = frame_of(thread), None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OURS) or (inner is None and path.startswith(_TORCH)):
            inner = frame
        elif not path.startswith(_LIBRARIES):
            line = f"{os.path.basename(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
            return line + (f", in {_name_of(inner)}" if inner is not None else "")
        frame = frame.f_back
    return _name_of(inner) if inner is not None else ""


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the innermost Python frame of a thread, None if it does not run.

    Example:
        >>> import threading
        >>> from accel_callbacks.distributed.stack import frame_of
        >>> frame_of(threading.current_thread()).f_code.co_name
        'frame_of'
    """
    if sys.version_info >= (3, 12, 2):
        return sys._current_frames().get(thread.ident or 0)
    # Before, it holds a lock of the interpreter while it allocates. A collection of garbage at that
    # moment may run code that lets another thread go on, which waits for the lock with the GIL.
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread.ident or 0)
    finally:
        if collects:
            gc.enable()


def _name_of(frame: FrameType) -> str:
    """Return the name of a function, with its module unless it is a method of Accelerator."""
    module = str(frame.f_globals.get("__name__", ""))
    owner = "Accelerator" if module == "accel_callbacks.accelerator" else module
    return f"{owner}.{frame.f_code.co_name}"


def call_of_torch(frame: FrameType | None) -> tuple[int, int] | None:
    """Identify the call of torch.distributed in which a frame is; None outside of one.

    Example:
        >>> from accel_callbacks.distributed.stack import call_of_torch
        >>> call_of_torch(None) is None
        True
    """
    inside = frame is not None and frame.f_code.co_filename.startswith(f"{_TORCH}distributed")
    return (id(frame), frame.f_lasti) if frame is not None and inside else None


class SaveCalls:
    """Measures how long all threads that save have made no progress.

    A mount that is gone blocks one call for ever, while the other threads of the process live on.
    A thread progresses if it is in another call than before, or used the processor: to copy a
    large file takes one call of the same line after the other, or a single long one.

    Example:
        >>> from accel_callbacks.distributed.stack import SaveCalls
        >>> SaveCalls().seconds()
        0.0
    """

    def __init__(self) -> None:
        self._since: dict[int, tuple[tuple[int, int, int], float]] = {}

    def seconds(self) -> float:
        """Return the seconds since one of them progressed; 0 without any, or if not known."""
        now, before, self._since = time.monotonic(), self._since, {}
        for thread in threading.enumerate():
            frame = frame_of(thread)
            if frame is None or call_of_torch(frame) is not None or not _is_saving(frame):
                continue
            ticks = _processor_ticks(thread)
            if ticks is None:
                return 0.0
            state = id(frame), frame.f_lasti, ticks
            known, since = before.get(thread.ident or 0, (None, now))
            self._since[thread.ident or 0] = state, since if known == state else now
        return min((now - since for _, since in self._since.values()), default=0.0)


def _processor_ticks(thread: threading.Thread) -> int | None:
    """Return the processor time of a thread, mostly in 1/100 s; None if only other systems know.

    A tick is coarse enough that the retries of the kernel on a dead mount make none.
    """
    # Of a process that was forked, threading knows the id that this thread had in its parent.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    with suppress(OSError, ValueError):
        fields = Path(f"/proc/self/task/{number}/stat").read_text().rpartition(")")[2]
        return sum(map(int, fields.split()[11:13]))
    return None


def _is_saving(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_SAVING):
            return True
        frame = frame.f_back
    return False
