"""The attempts of a launch: which failure is worth another one, and what each has cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from accel_callbacks.launch.extension import LaunchExtension
from accel_callbacks.launch.report import (
    Failure,
    code_of,
    describe_ending,
    first_line,
    is_consequence,
    record_of,
    root_cause,
)

__all__ = ["Attempts", "RestartingAgent"]

_SIGTERM = -15
_TRY_AGAIN_LATER = 75  # EX_TEMPFAIL: what `Preemption` exits with


class Attempts:
    """Prints what each attempt has cost, and decides whether another one follows.

    Args:
        restarts: how often all processes may be restarted after a failure.
        preemptions: how often they may be restarted after a preemption, which is no failure.
        quiet: print nothing.
        parts: have a word to add about several attempts.
    """

    def __init__(
        self, restarts: int, preemptions: int, quiet: bool, parts: Sequence[LaunchExtension] = ()
    ) -> None:
        self._restarts = restarts
        self._preemptions = preemptions if restarts else 0
        self._quiet = quiet
        self._parts = parts
        self._seconds: list[float] = []  # of each attempt that has ended
        self._launched = self._ended = time.monotonic()
        self._began: float | None = None
        self._last: tuple[str, int] | None = None  # fingerprint and step of the last error

    def begin(self) -> None:
        """Begin an attempt."""
        self._began = time.monotonic()
        if self._seconds:
            pause = self._began - self._ended
            self._print(f"attempt {len(self._seconds) + 1} begins after {pause:.1f} s")

    def end(self, text: str, *, failed: bool = False) -> None:
        """End an attempt, unless it has ended already; the first is worth a line if it failed."""
        if self._began is None:
            return
        self._ended = time.monotonic()
        self._seconds.append(self._ended - self._began)
        self._began = None
        number, seconds = len(self._seconds), self._seconds[-1]
        if number > 1 or (failed and self._restarts):
            self._print(f"attempt {number} took {seconds:.1f} s: {text}")

    def fail(self, failures: Mapping[int, Failure], left: int) -> tuple[bool, bool]:
        """End an attempt with the failures of its ranks.

        Args:
            failures: by rank.
            left: restarts that are left.

        Returns:
            Whether to restart the processes, and whether that counts as a restart.
        """
        # One rank decides for all: its peers fail by losing it, whatever was the matter with it.
        rank = root_cause(failures)
        failure = failures[rank]
        # The peers of a process that got a SIGTERM have lost it; the launcher stops the others.
        stopped = any(code_of(peer) == _SIGTERM for peer in failures.values())
        preempted = code_of(failure) in (_SIGTERM, _TRY_AGAIN_LATER)
        preempted = preempted or (stopped and is_consequence(failure))
        reason = "" if preempted else self._reason_to_stop(failure)
        counts = not (preempted and self._preemptions)
        restarts = self._restarts > 0 and not reason and (left > 0 or not counts)
        cause = first_line(failure)
        text = f"rank {rank} {describe_ending(code_of(failure))}" + (f" ({cause})" if cause else "")
        if reason:
            text += f"; no restart: {reason}"
        elif restarts and counts:
            text += f"; restarting, {left - 1} restarts left"
        elif restarts:
            self._preemptions -= 1
            text += f"; a preemption, restarting, {self._preemptions} more of these"
        self.end(text, failed=True)
        return restarts, counts

    def _reason_to_stop(self, failure: Failure) -> str:
        """Return why the error comes again in another attempt; empty if it may not."""
        record = record_of(failure)
        last, self._last = self._last, None
        error, step = record.get("fingerprint"), record.get("step")
        if error and isinstance(step, int) and not record.get("follows"):
            self._last = (str(error), step)
        if record.get("recurs"):
            return str(record["recurs"])
        if self._last is not None and self._last == last:
            return f"the same error came at the same step ({step}) in the attempt before"
        return ""

    def close(self, text: str) -> None:
        """End the last attempt, and print the sum of several."""
        self.end(text)
        if len(self._seconds) < 2 or self._quiet:
            return
        added = "".join(f"; {text}" for part in self._parts if (text := part.summary()))
        whole = self._ended - self._launched
        parts = " + ".join(f"{seconds:.1f}" for seconds in self._seconds)
        between = whole - sum(self._seconds)
        self._print(
            f"{len(self._seconds)} attempts took {parts} s, and {between:.1f} s before and "
            f"between them{added}"
        )

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(f"accel launch: {text}", file=sys.stderr, flush=True)


class RestartingAgent(LocalElasticAgent):
    """Torch's agent, with another attempt only where that may help.

    Args:
        attempts: decides on restarts.
        options: of torch's agent.
    """

    _remaining_restarts: int

    def __init__(self, attempts: Attempts, **options: Any) -> None:
        super().__init__(**options)
        self._attempts = attempts

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers: dict[int, Any] = super()._start_workers(worker_group)
        self._attempts.begin()
        return workers

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._attempts.end("a machine has joined")  # after a failure here it has ended already
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED:
            self._attempts.end("all ranks are done")
        elif result.is_failed() and result.failures:
            restarts, counts = self._attempts.fail(result.failures, self._remaining_restarts)
            if not restarts:
                # torch looks at this number next, and ends the launch where none is left.
                self._remaining_restarts = 0
            elif not counts:
                # Both, so that torch numbers the attempts, and their folders, as before.
                self._worker_group.spec.max_restarts += 1
                self._remaining_restarts += 1
        return result
