"""What ``accel launch`` says when a process failed: which rank, how, and where its traceback is."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

_MOST_LINES = 60
# The peers of a dead rank fail too, by exception or abort; these do not happen to a mere peer.
_ROOT_SIGNALS = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
# What the collectives and this library say on the other ranks.
_CONSEQUENCES = (
    "RemoteError",
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
        """When it was seen to fail, in seconds since the epoch."""

    @property
    def message(self) -> object:
        """Error record of the process, or torch's sentence for the lack of one."""


def exit_code(code: int) -> int:
    """Turn a child's code into ours, as a shell does: signal n becomes 128 + n."""
    return code if code >= 0 else 128 - code


def root_cause(failures: Mapping[int, Failure]) -> int:
    """Rank that failed first, as far as the launcher can tell.

    The peers of a failed rank fail within a moment too, and their clocks say little about who was
    first: among failures of the same two seconds, what they are decides before when they were.
    """
    seen = list(failures)
    whole = {rank: failures[rank] for rank in seen if not _stopped(failures[rank])} or failures
    first = min(_seconds(failure) for failure in whole.values())

    def order(rank: int) -> tuple[bool, bool, float, int]:
        failure = failures[rank]
        late = _seconds(failure) - first >= 2
        killed = -failure.exitcode in _ROOT_SIGNALS and not late
        return late or _follows(failure), not killed, _seconds(failure), seen.index(rank)

    return min(whole, key=order)


def _seconds(failure: Failure) -> float:
    """When it happened: as our processes write it, or to the second."""
    extra = failure.message.get("extraInfo") if isinstance(failure.message, Mapping) else None
    try:
        return float(extra["seconds"]) if isinstance(extra, Mapping) else float(failure.timestamp)
    except (KeyError, ValueError, TypeError):
        return float(failure.timestamp)


def _follows(failure: Failure) -> bool:
    """Tell whether the error says that another rank has failed."""
    text = "\n".join(_message(failure))
    return any(words in text for words in _CONSEQUENCES)


def _stopped(failure: Failure) -> bool:
    """Tell whether the process ended as those do that the launcher stops."""
    return failure.exitcode == -signal.SIGTERM


def failure_report(failures: Mapping[int, Failure], script: str, log_dir: str | None) -> str:
    """Describe the failed ranks: the traceback of the first one, and the others in a line."""
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
    # With one traceback on the screen there is no need to find it among others.
    whole = _traceback(failure) if failed or log is not None else []
    lines += [f"  {text}" for text in whole or _message(failure)]
    named = {"also failed": failed, "then stopped by the launcher": stopped}
    lines += [f"  {title}: {', '.join(ranks)}" for title, ranks in named.items() if ranks]
    lines.append(f"  {_where(rank, failure, log, bool(whole))}")
    return "\n".join(lines)


def _how(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _message(failure: Failure) -> list[str]:
    """Return the error text that the rank left behind, or a hint for a kill."""
    if -failure.exitcode == signal.SIGKILL:
        return ["SIGKILL often means out of memory: see the kernel log, or use smaller batches"]
    if isinstance(failure.message, Mapping):
        return str(failure.message.get("message", "")).splitlines()
    return []


def _traceback(failure: Failure) -> list[str]:
    """The traceback that the rank left behind; of a very long one, its end."""
    extra = failure.message.get("extraInfo") if isinstance(failure.message, Mapping) else None
    text = str(extra.get("py_callstack", "")) if isinstance(extra, Mapping) else ""
    lines = text.splitlines()
    return lines if len(lines) <= _MOST_LINES else ["...", *lines[-_MOST_LINES:]]


def _where(rank: int, failure: Failure, log: Path | None, shown: bool) -> str:
    """Say where the rank's own output is to be read."""
    if log is not None:
        return f"its output: {log}"
    what = "traceback" if _message(failure) and failure.exitcode > 0 else "output"
    above = "" if shown else f"its {what} is above, on standard error of rank {rank}; "
    return f"{above}to keep the output of each rank apart, add --log_dir logs --tee 3"


def _log_file(log_dir: str | None, local_rank: int) -> Path | None:
    """Newest non-empty stderr log of the local rank, if the streams went to files."""
    if log_dir is None:
        return None
    logs = Path(log_dir).glob(f"*/attempt_*/{local_rank}/stderr.log")
    written = [log for log in logs if log.stat().st_size]
    return max(written, key=lambda log: log.stat().st_mtime, default=None)
