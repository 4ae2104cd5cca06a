"""What ``accel launch`` says when a process failed: which rank, how, and where its traceback is."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

# The peers of a dead rank fail too, by exception or abort; these do not happen to a mere peer.
_ROOT_SIGNALS = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


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
    """Rank that failed first, as far as the launcher can tell within one second.

    The peers of a failed rank are stopped with SIGTERM and are listed after it.
    """
    seen = list(failures)

    def order(rank: int) -> tuple[int, bool, bool, int]:
        failure = failures[rank]
        killed = -failure.exitcode in _ROOT_SIGNALS
        return failure.timestamp, _stopped(failure), not killed, seen.index(rank)

    return min(failures, key=order)


def _stopped(failure: Failure) -> bool:
    """Tell whether the process ended as those do that the launcher stops."""
    return failure.exitcode == -signal.SIGTERM


def failure_report(failures: Mapping[int, Failure], script: str, log_dir: str | None) -> str:
    """Describe the failed ranks in a few lines."""
    rank = root_cause(failures)
    failure = failures[rank]
    lines = [
        f"accel launch: {script} failed: rank {rank} {_how(failure.exitcode)} "
        f"(local rank {failure.local_rank}, pid {failure.pid})"
    ]
    lines += [f"  {text}" for text in _message(failure)]
    others = [peer for peer in sorted(failures) if peer != rank]
    failed = [f"rank {p} {_how(failures[p].exitcode)}" for p in others if not _stopped(failures[p])]
    stopped = [f"rank {p}" for p in others if _stopped(failures[p])]
    named = {"also failed": failed, "then stopped by the launcher": stopped}
    lines += [f"  {title}: {', '.join(ranks)}" for title, ranks in named.items() if ranks]
    lines.append(f"  {_where(rank, failure, log_dir)}")
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


def _where(rank: int, failure: Failure, log_dir: str | None) -> str:
    """Say where the traceback of the rank is to be read."""
    log = _log_file(log_dir, failure.local_rank)
    if log is not None:
        return f"its output: {log}"
    return (
        f"its traceback is above, on standard error of rank {rank}; to keep the output of each "
        "rank apart, add --log_dir logs --tee 3"
    )


def _log_file(log_dir: str | None, local_rank: int) -> Path | None:
    """Newest non-empty stderr log of the local rank, if the streams went to files."""
    if log_dir is None:
        return None
    logs = Path(log_dir).glob(f"*/attempt_*/{local_rank}/stderr.log")
    written = [log for log in logs if log.stat().st_size]
    return max(written, key=lambda log: log.stat().st_mtime, default=None)
