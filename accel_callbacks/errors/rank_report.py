"""The report of a rank whose script ends with an error: one cause, one traceback.

The rank that failed shows its error, the others say in a line that they have lost it, or have the
same one. They know from the files in which torch's launcher keeps the error of each process.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from accel_callbacks.errors import LostRankError, RemoteError
from accel_callbacks.errors.text import (
    VARIABLE,
    folded_text,
    innermost_call,
    is_library_error,
    passes_through_library,
    shows_all_frames,
    whole_text,
)
from accel_callbacks.recurrence import digest, fingerprint, reason_to_recur, step_of
from checkpoint_io.local_files import replace

__all__ = ["CONSEQUENCES", "install_excepthook", "is_default_hook", "report_error"]

#: In the errors of collectives and of this library on the peers of a failed rank.
CONSEQUENCES = (
    "RemoteError",
    "LostRankError",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "remote process exited",
    "Failed to recv",
)
_PATIENCE = 3.0  # seconds that a rank waits for the report of the one that it has lost
_POLLING = 0.02
_WHOLE = "traceback.txt"  # beside the record of the rank
T = TypeVar("T")


def report_error(error: Exception, trace: TracebackType | None) -> None:
    """Print the error that ends a script under its rank, and write it for the launcher.

    Args:
        error: the error.
        trace: its traceback, from the first frame of the script on.
    """
    hook, place = sys.excepthook, _Place.of_this_process()
    if is_default_hook(hook):
        _print(error, trace, place, place.title())
        return
    place.write(error, trace, _Report(whole_text(error, trace)))
    if sys.stderr is not None:
        sys.stderr.write(place.title())
        hook(type(error), error, trace)
        sys.stderr.flush()


def install_excepthook() -> None:
    """Report the error that ends this process here, unless the script has a hook of its own."""
    if not hasattr(sys, "ps1") and is_default_hook(sys.excepthook):
        sys.excepthook = _excepthook


def is_default_hook(hook: Any) -> bool:
    """Return whether a hook is Python's, ours, or torch's prefix of the rank around one of these.

    Args:
        hook: the value of ``sys.excepthook``.
    """
    while getattr(hook, "__module__", None) == "torch.distributed.distributed_c10d":
        names = hook.__code__.co_freevars
        cells = dict(zip(names, hook.__closure__ or (), strict=False))
        if "old_hook" not in cells:
            return False
        hook = cells["old_hook"].cell_contents
    return hook is sys.__excepthook__ or hook is _excepthook


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    try:
        place = _Place.of_this_process()
        # Ctrl-C, and an error of a process without peers in which nothing of ours takes part.
        if not isinstance(error, Exception) or (
            place.world == 1 and not passes_through_library(error, trace)
        ):
            sys.__excepthook__(kind, error, trace)
        else:
            _print(error, trace, place, place.title() if place.world > 1 else "")
    except Exception:  # a fault of ours must not hide the error
        sys.__excepthook__(kind, error, trace)


def _print(error: Exception, trace: TracebackType | None, place: _Place, title: str) -> None:
    """Write the record, and print the report in one call: other ranks write to the same screen."""
    report = _report(error, trace, place)
    place.write(error, trace, report)
    if sys.stderr is not None:
        sys.stderr.write(title * (report.told_by is None) + report.text)
        sys.stderr.flush()


class _Report(NamedTuple):
    text: str  # to be printed
    told_by: int | None = None  # the rank that shows the traceback, where this one has a line
    follows: bool = False  # the error is a consequence of another rank's


class _Place(NamedTuple):
    """Where this process is among the ranks, and the folder of its record."""

    rank: int
    world: int
    local: int
    local_world: int
    folder: Path | None

    @classmethod
    def of_this_process(cls) -> _Place:
        rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
        path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        folder = Path(path).parent if path and Path(path).parent.is_dir() else None
        local, local_world = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world)
        return cls(rank, world, local, local_world, None if path == os.devnull else folder)

    def title(self) -> str:
        """Return the line above a traceback."""
        return (
            f"rank {self.rank} of {self.world} failed (local rank {self.local}, "
            f"pid {os.getpid()}):\n"
        )

    def peers(self) -> list[int]:
        """Return the other ranks of this machine."""
        first = self.rank - self.local
        return [first + local for local in range(self.local_world) if local != self.local]

    def has_reported(self, rank: int, *, itself: bool = False) -> bool:
        """Return whether a rank of this machine has written a record.

        Args:
            rank: of the process.
            itself: do not count the record of an error that follows from another rank's.
        """
        if self.folder is None:
            return False
        path = self.folder.parent / str(rank - self.rank + self.local) / "error.json"
        with suppress(OSError, ValueError, AttributeError):
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            return not (itself and message["extraInfo"].get("follows"))
        return False

    def first_with(self, text: str) -> int:
        """Return the first rank of this machine that fails with a text: this one if none has."""
        if self.folder is None:
            return self.rank
        path = self.folder.parent / f"error-{digest(text)}"
        with suppress(OSError, ValueError):  # such as a full disk
            try:
                with path.open("x") as file:
                    file.write(f"{self.rank}\n")
            except FileExistsError:
                rank = _wait_for(lambda: path.read_text() if path.stat().st_size else None, 0.5)
                return int(rank or self.rank)
        return self.rank

    def write(self, error: Exception, trace: TracebackType | None, report: _Report) -> None:
        """Write the record that torch's launcher reads, unless the script has written one."""
        if self.folder is None:
            return
        now, path = time.time(), self.folder / "error.json"
        extra = {
            "py_callstack": report.text,
            "timestamp": str(int(now)),
            "seconds": f"{now:.6f}",
            "told_by": report.told_by,
            "follows": report.follows,
            "step": step_of(error),
            "fingerprint": fingerprint(error, trace),
            "recurs": reason_to_recur(error, trace),
        }
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        with suppress(OSError):  # such as a full disk: the error is still printed
            if not path.exists():
                record = {"message": {"message": summary, "extraInfo": extra}}
                part = path.with_suffix(".part")
                part.write_text(json.dumps(record), encoding="utf-8", errors="backslashreplace")
                replace(part, path)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def _report(error: Exception, trace: TracebackType | None, place: _Place) -> _Report:
    """Return what this rank shows of its error."""
    whole, follows = whole_text(error, trace), _follows(error, trace)
    alone = place.world == 1 and not passes_through_library(error, trace)
    if alone or shows_all_frames():
        return _Report(whole, follows=follows)
    if follows and (report := _report_of_follower(error, trace, place)):
        return report
    text, line = folded_text(error, trace), innermost_call(error, trace)[1]
    summary = "".join(traceback.format_exception_only(type(error), error))
    first = place.first_with(f"{summary} {line}")
    if first != place.rank:
        return _Report(f"rank {place.rank}: the same error as rank {first}{_at(line)}\n", first)
    if text != whole:
        text = folded_text(error, trace, _save_all_frames(whole, place))
    return _Report(text, follows=follows)


def _save_all_frames(whole: str, place: _Place) -> str:
    """Write the whole text into the folder of the record; return the line that says where it is."""
    if place.folder is not None:
        path = place.folder / _WHOLE
        with suppress(OSError):
            path.write_text(whole, encoding="utf-8", errors="backslashreplace")
            return f"  all frames: {path}, or set {VARIABLE}=1\n"
    return f"  all frames: set {VARIABLE}=1\n"


def _follows(error: Exception, trace: TracebackType | None) -> bool:
    """Return whether an error is a consequence of the failure of another rank."""
    if isinstance(error, RemoteError):
        return True
    follows = any(words in str(error) for words in CONSEQUENCES)
    return follows and is_library_error(error, trace)


def _report_of_follower(
    error: Exception, trace: TracebackType | None, place: _Place
) -> _Report | None:
    """Return the line of a rank that has lost another one; None if that one shows no cause."""
    call, line = innermost_call(error, trace)
    peers, cause = place.peers(), error.rank if isinstance(error, RemoteError) else None
    if isinstance(error, LostRankError) and (cause is None or not place.has_reported(cause)):
        text = f"rank {place.rank}: {type(error).__name__}: {error}\n"  # it shows nothing itself
        return _Report(text, place.rank if cause is None else cause, follows=True)

    def reported() -> int | None:
        if cause is not None:
            return cause if place.has_reported(cause) else None
        return next((peer for peer in peers if place.has_reported(peer, itself=True)), None)

    can_report = place.folder is not None and (cause is None or cause in peers)
    lost = _wait_for(reported, _PATIENCE) if can_report else None
    if lost is None:
        return None
    in_call = f" in {call}" if call else ""
    text = f"rank {place.rank}: lost rank {lost}{in_call}{_at(line)}\n"
    return _Report(text, lost, follows=True)


def _at(line: str) -> str:
    return f", at {line}" if line else ""


def _wait_for(look: Callable[[], T | None], seconds: float) -> T | None:
    """Return what a function returns once that is not None, or None after some seconds."""
    deadline = time.monotonic() + seconds
    while (value := look()) is None and time.monotonic() < deadline:
        time.sleep(_POLLING)
    return value
