"""Where threads are, for errors and for the watch over calls that hang."""

from __future__ import annotations

import functools
import gc
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from accel_callbacks.distributed.processes import stat_fields

__all__ = [
    "Call",
    "StuckCalls",
    "call_of_torch",
    "entry_of",
    "is_saving",
    "place_of",
    "place_of_thread",
    "stacks",
    "thread_is_asleep",
    "waits_for_worker",
]

_HERE = Path(__file__).parents[2]
_OURS = tuple(f"{_HERE / name}{os.sep}" for name in ("accel_callbacks", "checkpoint_io", "loggers"))
_SAVING = tuple(f"{_HERE / 'checkpoint_io' / name}{os.sep}" for name in ("saver", "storage"))
_LEASE = str(_HERE / "checkpoint_io" / "storage" / "lease.py")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LOADER = os.path.join(_TORCH, "utils", "data", "dataloader.py")
_TORCH_ROOT = os.path.dirname(_TORCH.rstrip(os.sep))
# Frames of code that is neither the user's nor ours. Installed packages are in purelib.
_LIBRARIES = (_TORCH, *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib")), "<")

_collections = threading.RLock()  # whoever stops them starts them again


class Call(NamedTuple):
    """A frame of a thread.

    Args:
        path: of the file.
        line: in the file, 0 if unknown.
        name: of the function.

    Example:
        >>> from accel_callbacks.distributed.stack import Call
        >>> print(Call("train.py", 12, "main"))
        File "train.py", line 12, in main
    """

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f'File "{self.path}", line {self.line}, in {self.name}'


def stacks() -> dict[int, list[Call]]:
    """Return the Python frames of all threads by their identifiers, innermost first."""
    by_thread = {}
    with _pause_collection():
        for number, frame in sys._current_frames().items():
            calls: list[Call] = []
            inner: FrameType | None = frame
            while inner is not None:
                code = inner.f_code
                calls.append(Call(code.co_filename, inner.f_lineno or 0, code.co_name))
                inner = inner.f_back
            by_thread[number] = calls
    return by_thread


@contextmanager
def _pause_collection() -> Iterator[None]:
    """Context manager: collect no garbage on Python before 3.12.2.

    A frame object that is made there may first collect garbage, and the thread whose frame it is
    may go on meanwhile: what the object refers to is gone then. ``sys._current_frames`` also holds
    a lock in which that thread may wait with the GIL. Faulthandler is no way out: it does not hold
    that lock, and crashes on a thread that is just entering Python from C.
    """
    if sys.version_info >= (3, 12, 2):
        yield
        return
    _keep_from_forks()
    with _collections:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


@functools.cache
def _keep_from_forks() -> None:
    """Let no fork begin meanwhile: it would never collect garbage."""
    if hasattr(os, "register_at_fork"):
        acquire, release = _collections.acquire, _collections.release
        os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=release)


def place_of(calls: Sequence[Call]) -> str:
    """Describe where a thread is: the line of the user's code, and the call of ours or torch's.

    Args:
        calls: frames of the thread, innermost first.

    Example:
        >>> from accel_callbacks.distributed.stack import Call, place_of
        >>> place_of([Call("train.py", 12, "main")])
        'train.py:12 in main'
    """
    inner: Call | None = None
    for call in calls:
        if call.path.startswith(_OURS) or (inner is None and call.path.startswith(_TORCH)):
            inner = call
        elif not call.path.startswith(_LIBRARIES):
            line = f"{os.path.basename(call.path)}:{call.line} in {call.name}"
            return line + (f", in {_name_of(inner)}" if inner is not None else "")
    return _name_of(inner) if inner is not None else ""


def place_of_thread(thread: threading.Thread) -> str:
    """Describe where a thread is now."""
    return place_of(stacks().get(thread.ident or 0, ()))


def _name_of(call: Call) -> str:
    """Return the name of a function, with its module unless it is a method of Accelerator."""
    root = _TORCH_ROOT if call.path.startswith(_TORCH) else str(_HERE)
    path = call.path[len(root) :].removesuffix(".py").removesuffix("__init__")
    module = path.strip(os.sep).replace(os.sep, ".")
    owner = "Accelerator" if module == "accel_callbacks.accelerator" else module
    return f"{owner}.{call.name}"


def entry_of(calls: Sequence[Call]) -> str:
    """Return the name of the function of ours or torch's that the user's code has called, or "".

    Args:
        calls: frames of the thread, innermost first.

    Example:
        >>> from accel_callbacks.distributed.stack import Call, entry_of
        >>> entry_of([Call("train.py", 12, "main")])
        ''
    """
    name = ""
    for call in calls:
        if call.path.startswith((*_OURS, _TORCH)):
            name = call.name if call.name != "wrapper" else name
        elif not call.path.startswith(_LIBRARIES):
            break
    return name


def call_of_torch(calls: Sequence[Call]) -> bool:
    """Return whether a thread is in a call of torch.distributed.

    Args:
        calls: frames of the thread, innermost first.
    """
    return bool(calls) and calls[0].path.startswith(f"{_TORCH}distributed")


class StuckCalls:
    """Measures how long all threads in calls of one kind have made no progress.

    A mount that is gone blocks one call for ever, while the other threads of the process live on.
    A thread progresses if it is in another call than before, or used the processor: to copy a
    large file takes one call of the same line after the other, or a single long one.

    Args:
        is_watched: returns whether frames of a thread, innermost first, are in such a call.
    """

    def __init__(self, is_watched: Callable[[Sequence[Call]], bool]) -> None:
        self._is_watched = is_watched
        self._since: dict[int, tuple[tuple[Sequence[Call], int], float]] = {}

    def seconds(self, frames: Mapping[int, Sequence[Call]]) -> float:
        """Return the seconds since one of them progressed; 0 without any, or if not known.

        Args:
            frames: of all threads now, see :func:`stacks`.
        """
        now, before, self._since = time.monotonic(), self._since, {}
        for thread in threading.enumerate():
            calls = frames.get(thread.ident or 0, ())
            if call_of_torch(calls) or not self._is_watched(calls):
                continue
            ticks = _processor_ticks(thread)
            if ticks is None:
                return 0.0
            state = calls, ticks
            known, since = before.get(thread.ident or 0, (None, now))
            self._since[thread.ident or 0] = state, since if known == state else now
        return min((now - since for _, since in self._since.values()), default=0.0)


def thread_is_asleep(thread: threading.Thread) -> bool:
    """Return whether a thread waits in the kernel; False if only other systems know."""
    fields = _fields_of(thread)
    return bool(fields) and fields[0] in ("S", "D")


def _processor_ticks(thread: threading.Thread) -> int | None:
    """Return the processor time of a thread, mostly in 1/100 s; None if only other systems know.

    A tick is coarse enough that the retries of the kernel on a dead mount make none.
    """
    fields = _fields_of(thread)
    return sum(map(int, fields[11:13])) if fields else None


def _fields_of(thread: threading.Thread) -> list[str]:
    """Return what Linux tells of a thread, from its state on; nothing elsewhere."""
    # Of a process that was forked, threading knows the id that this thread had in its parent.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    return stat_fields(f"self/task/{number}")


def is_saving(calls: Sequence[Call]) -> bool:
    """Return whether frames are in a call of a save."""
    # The thread that renews a lease waits most of the time, with and without a save.
    renews = any(call.name == "_keep" and call.path == _LEASE for call in calls)
    return not renews and any(call.path.startswith(_SAVING) for call in calls)


def waits_for_worker(calls: Sequence[Call]) -> bool:
    """Return whether frames are in the wait of a DataLoader for a batch of its workers."""
    return any(call.name == "_try_get_data" and call.path == _LOADER for call in calls)
