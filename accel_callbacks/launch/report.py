"""Report a failed launch: the rank that failed first, its traceback, and where its output is."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from accel_callbacks.distributed.processes import ending_of
from accel_callbacks.errors.rank_report import CONSEQUENCES

_MOST_LINES = 60
_SIGKILL = 9  # the name is missing on Windows, and so is that of SIGBUS
# The peers of a dead rank fail too, by an exception or abort, but not by these signals.
_ROOT_SIGNALS = {_SIGKILL, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE}
if sys.platform != "win32":
    _ROOT_SIGNALS.add(signal.SIGBUS)
# Windows has no signals: the exit code says how a process crashed, and from here on they are such.
_FIRST_STATUS = 0x80000000
_CTRL_C = 0xC000013A


class Failure(Protocol):
    """The part of torch's ``ProcessFailure`` that is read here."""

    @property
    def local_rank(self) -> int:
        """Index on its machine."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def exitcode(self) -> int:
        """Exit code; -n for signal n."""

    @property
    def timestamp(self) -> int:
        """Time at which the failure was detected, in seconds since the epoch."""

    @property
    def message(self) -> object:
        """Error record of the process, or torch's text for a missing one."""


def exit_code(code: int) -> int:
    """Convert the exit code of a child as a shell does: signal n becomes 128 + n.

    A status of Windows becomes 1, and that of Ctrl-C 130.
    """
    status = status_of(code)
    if status is not None:
        return 130 if status == _CTRL_C else 1
    return code if code >= 0 else 128 - code


def status_of(code: int) -> int | None:
    """Return the status of Windows that an exit code is, read as signed or not; else None."""
    unsigned = code & 0xFFFFFFFF
    return unsigned if unsigned >= _FIRST_STATUS and not -256 < code < 0 else None


def code_of(failure: Failure) -> int:
    """Return the exit code of a process; 1 if it was stopped while it ended with an error."""
    code = failure.exitcode
    stopped = code == -signal.SIGTERM or status_of(code) == _CTRL_C
    return 1 if stopped and "told_by" in record_of(failure) else code


def root_cause(failures: Mapping[int, Failure]) -> int:
    """Return the rank that most likely failed first.

    The peers of a failed rank fail within a moment, and clocks of several machines differ: of
    failures within two seconds, their kind decides first, and only then their time.
    """
    seen = list(failures)
    candidates = {
        rank: failures[rank] for rank in seen if not _was_stopped(failures[rank])
    } or failures
    first = min(_seconds(failure) for failure in candidates.values())

    def order(rank: int) -> tuple[bool, bool, bool, float, int]:
        failure = failures[rank]
        late = _seconds(failure) - first >= 2
        status = status_of(failure.exitcode)
        crashed = -failure.exitcode in _ROOT_SIGNALS if status is None else status != _CTRL_C
        killed = crashed and not late
        kind = late or is_consequence(failure), not killed, _rank_with_report(failure) >= 0
        return *kind, _seconds(failure), seen.index(rank)

    return min(candidates, key=order)


def _seconds(failure: Failure) -> float:
    """Return the time of the failure: as recorded by our worker, or torch's, in whole seconds."""
    try:
        return float(record_of(failure).get("seconds", failure.timestamp))
    except (ValueError, TypeError):
        return float(failure.timestamp)


def is_consequence(failure: Failure) -> bool:
    """Return whether the error is a consequence of the failure of another rank."""
    text = "\n".join(_message(failure))
    return any(words in text for words in CONSEQUENCES)


def _rank_with_report(failure: Failure) -> int:
    """Return the rank that has shown the error of this one, or its cause; -1 if it has itself."""
    rank = record_of(failure).get("told_by")
    return rank if isinstance(rank, int) else -1


def record_of(failure: Failure) -> Mapping[str, Any]:
    """Return what our worker has recorded; empty for another program's record, or none."""
    extra = failure.message.get("extraInfo") if isinstance(failure.message, Mapping) else None
    return extra if isinstance(extra, Mapping) else {}


def _was_stopped(failure: Failure) -> bool:
    """Return whether the process ended by the signal with which the launcher stops processes."""
    code = code_of(failure)
    return code == -signal.SIGTERM or status_of(code) == _CTRL_C


def failure_report(failures: Mapping[int, Failure], script: str, log_dir: str | None) -> str:
    """Describe the failed ranks: the traceback of the first, and a line about the others."""
    rank = root_cause(failures)
    failure = failures[rank]
    others = [peer for peer in sorted(failures) if peer != rank]
    failed = []
    for peer in others:
        if not _was_stopped(failures[peer]):
            same = _rank_with_report(failures[peer]) >= 0 and not is_consequence(failures[peer])
            relation = " with the same error" if same else ""
            failed.append(f"rank {peer} {describe_ending(code_of(failures[peer]))}{relation}")
    stopped = [f"rank {p}" for p in others if _was_stopped(failures[p])]
    lines = [
        f"accel launch: {script} failed: rank {rank} {describe_ending(code_of(failure))} "
        f"(local rank {failure.local_rank}, pid {failure.pid})"
    ]
    teller = _rank_with_report(failure)  # the rank that shows the error
    teller = rank if teller not in failures or is_consequence(failure) else teller
    reason = failures[teller]
    log = _log_file(log_dir, reason.local_rank)
    # A single traceback on the screen is easy to find; among several, or in a log, it is not.
    loud = [peer for peer in others if peer != teller and _rank_with_report(failures[peer]) < 0]
    several = any(not _was_stopped(failures[peer]) for peer in loud)
    shown = _traceback(reason) if several or log is not None else []
    lines += [f"  {text}" for text in shown or _summary(failure)]
    named = {"also failed": failed, "then stopped by the launcher": stopped}
    lines += [f"  {title}: {', '.join(ranks)}" for title, ranks in named.items() if ranks]
    lines.append(f"  {_where(teller, reason, log, bool(shown))}")
    return "\n".join(lines)


def describe_ending(code: int) -> str:
    """Describe how a process ended."""
    status = status_of(code)
    if status is not None:
        return f"ended with status 0x{status:08X}"
    return ending_of(code)


def _message(failure: Failure) -> list[str]:
    """Return the recorded error of the rank, or a hint for SIGKILL."""
    if -failure.exitcode == _SIGKILL:
        return ["SIGKILL often means out of memory: see the kernel log, or use smaller batches"]
    if isinstance(failure.message, Mapping):
        return str(failure.message.get("message", "")).splitlines()
    return []


def first_line(failure: Failure) -> str:
    """Return the first line of the recorded error; empty for none."""
    return next(iter(_message(failure)), "") if isinstance(failure.message, Mapping) else ""


def _summary(failure: Failure) -> list[str]:
    """Return the first line of the message, which is whole in the output of the rank."""
    lines = _message(failure)
    return [f"{lines[0]} ..."] if len(lines) > 1 else lines


def _traceback(failure: Failure) -> list[str]:
    """Return the recorded traceback of the rank; the end of a very long one."""
    lines = str(record_of(failure).get("py_callstack", "")).splitlines()
    return lines if len(lines) <= _MOST_LINES else ["...", *lines[-_MOST_LINES:]]


def _where(rank: int, failure: Failure, log: Path | None, shown: bool) -> str:
    """Describe where to read the output of the rank."""
    if log is not None:
        return f"its output: {log}"
    source = "traceback" if _message(failure) and code_of(failure) > 0 else "output"
    above = "" if shown else f"its {source} is above, on standard error of rank {rank}; "
    return f"{above}to keep the output of each rank apart, add --log_dir logs --tee 3"


def _log_file(log_dir: str | None, local_rank: int) -> Path | None:
    """Return the newest non-empty stderr log of the local rank, if its streams went to files."""
    if log_dir is None:
        return None
    logs = Path(log_dir).glob(f"*/attempt_*/{local_rank}/stderr.log")
    written = [log for log in logs if log.stat().st_size]
    return max(written, key=lambda log: log.stat().st_mtime, default=None)
