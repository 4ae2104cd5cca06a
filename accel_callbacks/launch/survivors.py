"""Workers that survive the loss of another one: they wait for the next attempt, in their process.

torch's launcher ends all workers once one has failed. It asks each to end, waits, and kills those
that have not. A worker inside of `survive` takes part in the next attempt instead: to torch it has
ended with code 0, and starting it anew tells it what is different there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from accel_callbacks.launch_notes import ATTEMPT, SURVIVOR, leave_note, read_note

__all__ = ["Survivors"]

_PATIENCE = 30.0  # seconds from the request to end to SIGKILL, as in torch's launcher
_POLLING = 0.005
_HEAD_START = 2.0  # seconds by which a worker may end before the one that it has lost
_KILL: signal.Signals = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL


class Survivors:
    """Starts the workers of each attempt, but for those that have survived the one before.

    Args:
        notes: the folder in which processes leave notes for the launcher.
        start: starts a worker, as torch's ``get_subprocess_handler`` does.
        tell: prints a line for the user.

    Attributes:
        count: number of workers that were taken over into another attempt.
    """

    def __init__(
        self, notes: Path, start: Callable[..., SubprocessHandler], tell: Callable[[str], None]
    ) -> None:
        self.count = 0
        self._notes, self._start, self._tell = notes, start, tell
        self._workers: dict[int, _Worker] = {}  # by local rank
        self._awaited = False
        self._waits_since: float | None = None

    def start(self, **options: Any) -> _Worker:
        """Start a worker, or tell one that has survived about the next attempt.

        Args:
            options: of torch's ``get_subprocess_handler``.
        """
        rank = options["local_rank_id"]
        worker = self._workers.get(rank)
        if worker is not None and worker.survived and worker.handler.proc.poll() is None:
            streams = [options["stdout"], options["stderr"]]
            attempt = {"variables": options["env"], "streams": streams}
            leave_note(ATTEMPT.format(worker.pid), attempt)
            self.count += 1
            handler = worker.handler
        else:
            if worker is not None:
                with suppress(OSError):  # another process may get its id
                    (self._notes / SURVIVOR.format(worker.pid)).unlink()
            handler = self._start(**options)
        self._workers[rank] = _Worker(self, handler, rank, options["env"])
        return self._workers[rank]

    @contextmanager
    def kept(self, awaited: bool = False) -> Iterator[None]:
        """Context manager: keep those that have survived, unless the block fails.

        Args:
            awaited: a worker that is asked to end in the block may survive instead.
        """
        self._awaited = awaited
        try:
            if awaited:
                self._end_orphans()
                self._end_absent()
            yield
        except BaseException:
            self.dismiss()
            raise
        finally:
            self._awaited = False

    def dismiss(self) -> None:
        """Let those that have survived be ended like the others: no attempt follows."""
        for worker in self._workers.values():
            worker.survived = worker.asked = False

    def all_wait(self) -> bool:
        """Return whether all workers wait for the next attempt, and none of them has ended."""
        running = self._running()
        return len(running) == len(self._workers) and all(map(self.waits, running))

    def any_waits(self) -> bool:
        """Return whether a worker has lost one of another machine, or does so within a moment."""
        deadline = time.monotonic() + _HEAD_START
        while survivors := [worker for worker in self._running() if self._note_of(worker)]:
            if any(map(self.waits, survivors)):
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(_POLLING)
        return False

    def refuse(self) -> None:
        """Tell those that wait that no attempt follows: they end with their loss."""
        for worker in self._running():
            if self.waits(worker):
                leave_note(ATTEMPT.format(worker.pid), {})

    def outlives(self, worker: _Worker) -> bool:
        """Return whether a worker that is asked to end may take part in the next attempt."""
        return self._awaited and self._note_of(worker) is not None

    def waits(self, worker: _Worker) -> bool:
        """Return whether a worker waits for the next attempt."""
        return (self._note_of(worker) or {}).get("waits") is True

    def is_early(self, worker: _Worker) -> bool:
        """Return whether a worker has ended because of another one here, which is still ending.

        Under load it may be the first. The other one would be stopped then, and its own exit code
        lost, which is what the launch ends with.
        """
        cause = self._workers.get(worker.cause())
        return cause is not None and cause.handler.proc.poll() is None

    def tell_killed(self, worker: _Worker) -> None:
        """Say that a worker has not come to the next attempt."""
        self._tell(
            f"local rank {worker.rank} (pid {worker.pid}) does not survive the loss: it is stuck, "
            f"or its run has not ended within {_PATIENCE:.0f} s. It is killed and started anew"
        )

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.poll() is None]

    def _note_of(self, worker: _Worker) -> Any:
        return read_note(self._notes, SURVIVOR.format(worker.pid))

    def _end_orphans(self) -> None:
        """End what killed workers have left, such as loader workers: it holds their connections.

        The others would notice the loss only when that ends by itself, which takes seconds.
        """
        if sys.platform == "win32":  # it closes the connections of a process that ends
            return
        codes = {worker: worker.poll() for worker in self._workers.values()}
        if any(code is None and self._note_of(worker) for worker, code in codes.items()):
            for worker, code in codes.items():
                if code is not None and code < 0:
                    with suppress(OSError):  # it has left nothing
                        os.killpg(worker.pid, _KILL)

    def _end_absent(self) -> None:
        """Kill the workers that the others have lost, and which have not ended: they hang."""
        running = self._running()
        waiting = [worker for worker in running if self.waits(worker)]
        if not waiting or len(running) < len(self._workers):
            self._waits_since = None
            return
        self._waits_since = self._waits_since or time.monotonic()
        if time.monotonic() - self._waits_since > _PATIENCE:
            for worker in running:
                if worker not in waiting:
                    self.tell_killed(worker)
                    worker.handler.close(_KILL)


class _Worker:
    """A worker as torch's launcher sees it, in place of its ``SubprocessHandler``.

    Args:
        survivors: of the launch.
        handler: of torch, for its process.
        rank: local rank.
        environment: of the process.

    Attributes:
        survived: it waits for the next attempt, and has ended for torch.
        asked: it is to end, or to survive.
    """

    def __init__(
        self,
        survivors: Survivors,
        handler: SubprocessHandler,
        rank: int,
        environment: Mapping[str, str],
    ) -> None:
        self.handler, self.rank = handler, rank
        self.proc = self
        self.pid: int = handler.proc.pid
        self.survived = self.asked = False
        self._survivors, self._environment = survivors, environment
        # Until when its own end does not count, as soon as that is known; 0 once it always does.
        self._early_until: float | None = None

    def poll(self) -> int | None:
        """Return the exit code, 0 if it has survived; None while it runs, or ended too early."""
        if self.survived:
            return 0
        code: int | None = self.handler.proc.poll()
        if code and self._early_until is None:
            self._early_until = time.monotonic() + _HEAD_START
        early = code and time.monotonic() < (self._early_until or 0.0)
        return None if early and self._survivors.is_early(self) else code

    def cause(self) -> int:
        """Return the local rank of the loss that this one has ended with; -1 for another end."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            text = Path(self._environment["TORCHELASTIC_ERROR_FILE"]).read_text(encoding="utf-8")
            record = json.loads(text)["message"]["extraInfo"]
            first = int(self._environment["RANK"]) - self.rank
            return int(record["told_by"]) - first if record["follows"] else -1
        return -1

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, or until it waits for the next attempt.

        Raises:
            subprocess.TimeoutExpired: it does neither within ``timeout`` seconds.
        """
        if timeout is not None and self.asked:
            timeout = min(timeout, _PATIENCE)
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            self.survived = self.asked and self._survivors.waits(self)
            if not self.survived and deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.0 if self.survived else _POLLING)
        return code

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """End the process, or ask it to survive; kill one that was asked, and has not come."""
        self._early_until = 0.0
        if self.poll() is not None:
            return
        if death_sig != _KILL and self._survivors.outlives(self):
            self.asked = True
            return
        if self.asked and death_sig == _KILL:
            self._survivors.tell_killed(self)
        self.handler.close(death_sig)
