"""Workers that end because of another one: for torch's launcher they end no sooner than that one.

It stops all workers once one has failed. Under load, one that follows may be the first to end; the
exit code of the one that failed, which is what the launch ends with, would be lost.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

__all__ = ["Workers"]

_HEAD_START = 2.0  # seconds by which a worker may end before the one that it has lost
_GRACE = 30.0  # seconds from SIGTERM to SIGKILL, as in torch's launcher
_ENDS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # those that torch's launcher ends by


class Workers:
    """Starts the workers of each attempt.

    Args:
        start: starts a worker, as torch's ``get_subprocess_handler`` does.
    """

    def __init__(self, start: Callable[..., SubprocessHandler]) -> None:
        self._start = start
        self._workers: dict[int, _Worker] = {}  # by local rank

    def start(self, **options: Any) -> _Worker:
        """Start a worker.

        Args:
            options: of torch's ``get_subprocess_handler``.
        """
        rank = options["local_rank_id"]
        with _defer_signals():  # one in between would leave a process that nobody knows
            self._workers[rank] = _Worker(self, self._start(**options), rank, options["env"])
        return self._workers[rank]

    def close(self) -> None:
        """End the workers that still run.

        Torch's launcher ends those that it knows, and it knows none before all have started.
        """
        left = [one for one in self._workers.values() if one.handler.proc.poll() is None]
        for worker in left:
            worker.close(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        for worker in left:
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.handler.proc.kill()
                worker.wait()

    def runs(self, rank: int) -> bool:
        """Return whether the worker with a local rank has not ended yet."""
        worker = self._workers.get(rank)
        return worker is not None and worker.handler.proc.poll() is None


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Let signals that end the launcher come at the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets them
        yield
        return
    came: list[int] = []
    before = {}
    for name in _ENDS:
        number = getattr(signal, name, None)
        # Workers inherit what is ignored, and that it is.
        if number is not None and callable(signal.getsignal(number)):
            before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in came[:1]:
        signal.raise_signal(number)


class _Worker:
    """A worker as torch's launcher sees it, in place of its ``SubprocessHandler``.

    Args:
        workers: of this machine.
        handler: of torch, for its process.
        rank: local rank.
        environment: of the process.
    """

    def __init__(
        self,
        workers: Workers,
        handler: SubprocessHandler,
        rank: int,
        environment: Mapping[str, str],
    ) -> None:
        self.handler, self.proc = handler, self
        self.pid: int = handler.proc.pid
        self._workers, self._rank, self._environment = workers, rank, environment
        # Until when its own end does not count, as soon as that is known; 0 once it always does.
        self._early_until: float | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs, or if it ended too early."""
        code: int | None = self.handler.proc.poll()
        if code and self._early_until is None:
            self._early_until = time.monotonic() + _HEAD_START
        early = code and time.monotonic() < (self._early_until or 0.0)
        return None if early and self._workers.runs(self._cause()) else code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process.

        Raises:
            subprocess.TimeoutExpired: it does not end within ``timeout`` seconds.
        """
        code: int = self.handler.proc.wait(timeout)
        return code

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """End the process, unless it has ended."""
        self._early_until = 0.0
        if self.poll() is None:
            self.handler.close(death_sig)

    def _cause(self) -> int:
        """Return the local rank of the loss that this one has ended with; -1 for another end."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            text = Path(self._environment["TORCHELASTIC_ERROR_FILE"]).read_text(encoding="utf-8")
            record = json.loads(text)["message"]["extraInfo"]
            first = int(self._environment["RANK"]) - self._rank
            return int(record["told_by"]) - first if record["follows"] else -1
        return -1
