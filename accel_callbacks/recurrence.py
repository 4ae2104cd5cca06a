"""Whether the error that ends a process will come again if the process is started again."""

from __future__ import annotations

import errno
import hashlib
import re
from contextlib import suppress
from types import TracebackType

from accel_callbacks.errors.text import innermost_call, is_library_error

__all__ = ["digest", "fingerprint", "note_step", "reason_to_recur", "step_of"]

_STEP = "_accel_step"
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Of ours, by name: importing them would take as long as the report of the error.
_WRONG_OPTIONS = {"SettingsError", "PlanError", "ResumeError", "StateMismatchError"}
# The network, or another process, may be better the next time.
_PASSING = {"DistError", "RemoteError", "LeaseError", "StoreUnavailableError", "CancelledError"}


def note_step(error: BaseException, step: int) -> None:
    """Note at which step of its run an error was raised; the innermost run counts."""
    if step_of(error) is None:
        with suppress(AttributeError, TypeError):
            setattr(error, _STEP, step)


def step_of(error: BaseException) -> int | None:
    """Return the step that was noted, None for an error outside of a run."""
    step = getattr(error, _STEP, None)
    return step if isinstance(step, int) else None


def fingerprint(error: BaseException, trace: TracebackType | None) -> str:
    """Return a digest of the type, message and line of an error, without addresses of memory.

    It is empty for an error of the network or of another process, which may not come again.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    at_a_file = isinstance(error, FileNotFoundError | PermissionError | FileExistsError)
    if names & _PASSING or (isinstance(error, OSError) and not at_a_file):
        return ""
    return digest(f"{type(error).__qualname__}: {error} {innermost_call(error, trace)[1]}")


def digest(text: str) -> str:
    """Return a digest that is the same for a text on all ranks, whatever addresses it has."""
    plain = _ADDRESS.sub("0x", text)
    return hashlib.sha256(plain.encode("utf-8", "replace")).hexdigest()[:16]


def reason_to_recur(error: BaseException, trace: TracebackType | None) -> str:
    """Return why an error comes again at each start; empty if it may not."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL:
            return "the disk is full: make room, and start again"
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if isinstance(error, SyntaxError):
        return f"{error.filename or 'the code'} cannot be parsed, at any start"
    if isinstance(error, ImportError):
        return "the import fails at each start"
    names = {kind.__name__ for kind in type(error).__mro__}
    wrong_argument = isinstance(error, ValueError | TypeError) and step_of(error) is None
    if names & _WRONG_OPTIONS or (wrong_argument and is_library_error(error, trace)):
        return "an option is wrong, at each start"
    return ""
