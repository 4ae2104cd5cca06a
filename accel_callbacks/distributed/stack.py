"""Where threads and collectives are, for errors and for the watch over calls that hang."""

from __future__ import annotations

import functools
import gc
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from accel_callbacks.distributed.processes import stat_fields

__all__ = [
    "Call",
    "MainThread",
    "StuckCalls",
    "Wait",
    "call_of_torch",
    "dump_hang",
    "entry_of",
    "find_divergence",
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


# --- dumps of torch's flight recorder: what each rank's NCCL has done last -----------------------

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # since 2.10, and before


def dump_hang(rank: int, env: Mapping[str, str] | None = None) -> str:
    """Write this rank's dump, and return a sentence that says where it is.

    torch writes dumps when its own watchdog finds a timeout, which an abort of the run forestalls.

    Args:
        rank: of this process.
        env: the environment variables; those of this process if None.

    Returns:
        The sentence with a space before it; empty where no variable names a place for dumps, or
        nothing was recorded.
    """
    prefix = _prefix(os.environ if env is None else env)
    if prefix is None:
        return ""
    path = f"{prefix}{rank}"
    with suppress(Exception):  # a full disk must not keep the run from its abort
        if not os.path.exists(path) and (recorded := _read_recording()):
            with open(path, "xb") as out:
                out.write(recorded)
    if not os.path.exists(path):
        return ""
    folder, name = os.path.split(prefix)
    return f" What NCCL did last is in {prefix}*: torchfrtrace {folder or '.'} -p {name}"


def _prefix(env: Mapping[str, str]) -> str | None:
    """Return the path to which each rank is appended, None if no place was named."""
    if next((env[name] for name in _SIZES if name in env), "1") == "0":
        return None
    return next((env[name] for name in _PREFIXES if env.get(name)), None)


def _read_recording() -> bytes:
    """Return what torch has recorded; empty without NCCL, as in a torch for the CPU."""
    dump: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace", None)
    return b"" if dump is None else dump()


# --- ranks that wait for each other in different calls, none of which can end --------------------
# ``if accel.is_main_process: accel.save_state(...)`` is one: rank 0 waits there for the others,
# which wait for it in the next backward. Each rank notes with its heartbeat in which call its main
# thread is, and for how long it has been at that very place.

_PATIENCE = 5.0  # seconds at one place, on all ranks


class Wait(NamedTuple):
    """Where the main thread of a rank is.

    Args:
        call: the function of this library or torch that the script has called; empty for none.
        collective: it waits in a collective, and does not compute.
        seconds: for how long it has been at this very place.
    """

    call: str = ""
    collective: bool = False
    seconds: float = 0.0


class MainThread:
    """Measures for how long a thread has been at one place.

    Args:
        thread: the one that trains.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._calls: Sequence[Call] = ()
        self._since = self._asleep_since = 0.0

    def observe(self, calls: Sequence[Call]) -> Wait:
        """Return where the thread is.

        Args:
            calls: its frames now, innermost first.
        """
        now, moved = time.monotonic(), calls != self._calls
        self._calls = calls
        self._since = now if moved else self._since
        # A thread that is only kept from the processor is none that waits.
        asleep = call_of_torch(calls) and thread_is_asleep(self._thread)
        self._asleep_since = self._asleep_since if asleep and not moved else now
        since = self._asleep_since if asleep else self._since
        return Wait(entry_of(calls), asleep, now - since)


def find_divergence(rank: int, beats: Mapping[int, Mapping[str, Any]]) -> tuple[int, str] | None:
    """Return a rank that will not come to the collective in which this one waits, and what it did.

    That is certain where no rank moves, and each other one has begun a batch which comes after the
    call of this rank, or waits in a collective of another call.

    Args:
        rank: of this process.
        beats: the heartbeats of all ranks.

    Example:
        >>> from accel_callbacks.distributed.stack import find_divergence
        >>> beats = {
        ...     0: {"wait": ["save_state", True, 9.0], "progress": [0, 0, 2, 2]},
        ...     1: {"wait": ["backward", False, 9.0], "progress": [0, 0, 3, 2]},
        ... }
        >>> find_divergence(0, beats)[0]
        1
        >>> find_divergence(1, beats) is None
        True
    """
    waits = {peer: Wait(*beat["wait"]) for peer, beat in beats.items()}
    mine, progress = waits[rank], beats[rank]["progress"]
    # Of several that wait in collectives the first one tells.
    first = min((peer for peer, wait in waits.items() if wait.collective), default=None)
    still = all(wait.seconds >= _PATIENCE for wait in waits.values())
    if first != rank or not mine.call or not still:
        return None
    others = sorted(waits.keys() - {rank})
    for peer in others:
        elsewhere = waits[peer].collective and waits[peer].call != mine.call
        if not (elsewhere or _is_ahead(beats[peer]["progress"], progress)):
            return None
    return others[0], (
        f"went on without {mine.call}, in which rank {rank} waits for it: call {mine.call} on all "
        "processes, and not on one, as under `if accel.is_main_process:`"
    )


def _is_ahead(progress: Sequence[int], mine: Sequence[int]) -> bool:
    """Return whether a rank has begun a batch of this training that this one has not."""
    return len(progress) == len(mine) == 4 and (
        progress[0] == mine[0] and list(progress[1:3]) > list(mine[1:3])
    )
