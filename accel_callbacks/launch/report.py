"""Report a failed launch: the rank that failed first, its traceback, and where its output is."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

_MOST_LINES = 60
# The peers of a dead rank fail too, by an exception or abort, but not by these signals.
_ROOT_SIGNALS = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
# In the errors of collectives and of this library on the peers of a failed rank.
_CONSEQUENCES = (
    "RemoteError",
    "LostRankError",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "remote process exited",
    "Failed to recv",
)


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
    """Convert the exit code of a child as a shell does: signal n becomes 128 + n."""
    return code if code >= 0 else 128 - code


def root_cause(failures: Mapping[int, Failure]) -> int:
    """Return the rank that most likely failed first.

    The peers of a failed rank fail within a moment, and clocks of several machines differ: of
    failures within two seconds, their kind decides first, and only then their time.
    """
    seen = list(failures)
    candidates = {rank: failures[rank] for rank in seen if not _stopped(failures[rank])} or failures
    first = min(_seconds(failure) for failure in candidates.values())

    def order(rank: int) -> tuple[bool, bool, float, int]:
        failure = failures[rank]
        late = _seconds(failure) - first >= 2
        killed = -failure.exitcode in _ROOT_SIGNALS and not late
        return late or _follows(failure), not killed, _seconds(failure), seen.index(rank)

    return min(candidates, key=order)


def _seconds(failure: Failure) -> float:
    """Return the time of the failure: as recorded by our worker, or torch's, in whole seconds."""
    extra = failure.message.get("extraInfo") if isinstance(failure.message, Mapping) else None
    try:
        return float(extra["seconds"]) if isinstance(extra, Mapping) else float(failure.timestamp)
    except (KeyError, ValueError, TypeError):
        return float(failure.timestamp)


def _follows(failure: Failure) -> bool:
    """Return whether the error is a consequence of the failure of another rank."""
    text = "\n".join(_message(failure))
    return any(words in text for words in _CONSEQUENCES)


def _stopped(failure: Failure) -> bool:
    """Return whether the process ended by the signal with which the launcher stops processes."""
    return failure.exitcode == -signal.SIGTERM


def failure_report(failures: Mapping[int, Failure], script: str, log_dir: str | None) -> str:
    """Describe the failed ranks: the traceback of the first, and a line about the others."""
    rank = root_cause(failures)
    failure = failures[rank]
    others = [peer for peer in sorted(failures) if peer != rank]
    failed = [f"rank {p} {_how(failures[p].exitcode)}" for p in others if not _stopped(failures[p])]
    stopped = [f"rank {p}" for p in others if _stopped(failures[p])]
    lines = [
        f"accel launch: {script} failed: rank {rank} {_how(failure.exitcode)} "
        f"(local rank {failure.local_rank}, pid {failure.pid})"
    ]
    log = _log_file(log_dir, failure.local_rank)
    # A single traceback on the screen is easy to find; among several, or in a log, it is not.
    shown = _traceback(failure) if failed or log is not None else []
    lines += [f"  {text}" for text in shown or _message(failure)]
    named = {"also failed": failed, "then stopped by the launcher": stopped}
    lines += [f"  {title}: {', '.join(ranks)}" for title, ranks in named.items() if ranks]
    lines.append(f"  {_where(rank, failure, log, bool(shown))}")
    return "\n".join(lines)


def _how(code: int) -> str:
    """Describe how a process ended."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _message(failure: Failure) -> list[str]:
    """Return the recorded error of the rank, or a hint for SIGKILL."""
    if -failure.exitcode == signal.SIGKILL:
        return ["SIGKILL often means out of memory: see the kernel log, or use smaller batches"]
    if isinstance(failure.message, Mapping):
        return str(failure.message.get("message", "")).splitlines()
    return []


def _traceback(failure: Failure) -> list[str]:
    """Return the recorded traceback of the rank; the end of a very long one."""
    extra = failure.message.get("extraInfo") if isinstance(failure.message, Mapping) else None
    text = str(extra.get("py_callstack", "")) if isinstance(extra, Mapping) else ""
    lines = text.splitlines()
    return lines if len(lines) <= _MOST_LINES else ["...", *lines[-_MOST_LINES:]]


def _where(rank: int, failure: Failure, log: Path | None, shown: bool) -> str:
    """Describe where to read the output of the rank."""
    if log is not None:
        return f"its output: {log}"
    what = "traceback" if _message(failure) and failure.exitcode > 0 else "output"
    above = "" if shown else f"its {what} is above, on standard error of rank {rank}; "
    return f"{above}to keep the output of each rank apart, add --log_dir logs --tee 3"


def _log_file(log_dir: str | None, local_rank: int) -> Path | None:
    """Return the newest non-empty stderr log of the local rank, if its streams went to files."""
    if log_dir is None:
        return None
    logs = Path(log_dir).glob(f"*/attempt_*/{local_rank}/stderr.log")
    written = [log for log in logs if log.stat().st_size]
    return max(written, key=lambda log: log.stat().st_mtime, default=None)
