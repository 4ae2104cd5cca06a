"""A pool of real processes over gloo, which run functions of test modules."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener, wait
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.ports import free_port

WORKER = Path(__file__).with_name("pool_worker.py")
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)


class Crash(AssertionError):
    """A process of a pool ended by a signal that native code raises."""


class Pool:
    """Runs a function on all processes at once."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self._start()

    def _start(self) -> None:
        size = self.size
        address = str(self.folder / f"{os.urandom(4).hex()}.sock")
        environment = {
            **os.environ,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        with Listener(address, authkey=b"pool") as listener:
            self.processes = [
                warm.Popen(
                    [sys.executable, str(WORKER), address],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(size)
            ]
            accepted = [listener.accept() for _ in range(size)]
        ranked = {connection.recv(): connection for connection in accepted}
        self.connections = [ranked[rank] for rank in range(size)]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        """For each rank ("ok", result) or (name of the exception, its text)."""
        for connection in self.connections:
            connection.send((function.__code__.co_filename, function.__name__, args))
        results: dict[int, tuple[str, Any]] = {}
        try:
            while len(results) < self.size:
                waiting = [c for rank, c in enumerate(self.connections) if rank not in results]
                for connection in wait(waiting):
                    rank = self.connections.index(connection)
                    results[rank] = self._answer(rank, function.__name__)
        except BaseException:  # the limit of a test too
            self.restart()  # or each test after this one would fail too
            raise
        return [results[rank] for rank in range(self.size)]

    def _answer(self, rank: int, name: str) -> tuple[str, Any]:
        try:
            return self.connections[rank].recv()
        except (EOFError, OSError):
            code = self.processes[rank].wait()
            kind = Crash if code in CRASHES else AssertionError
            raise kind(f"rank {rank} ended with {code} in {name}") from None

    def restart(self) -> None:
        """Go on with new processes."""
        self.kill()
        self._start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results in rank order; fails with the traceback of a rank that failed."""
        try:
            outcomes = self.outcomes(function, *args)
        except Crash as crash:
            # A process of torch's with gloo ends so in one of ten runs of all tests, its heap
            # damaged, and valgrind sees no cause. What this library does wrong crashes again.
            warnings.warn(f"{crash}; the same call runs again", stacklevel=2)
            outcomes = self.outcomes(function, *args)
        failures = [f"rank {r}: {text}" for r, (kind, text) in enumerate(outcomes) if kind != "ok"]
        assert not failures, "\n".join(failures)
        return [result for _, result in outcomes]

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)
        codes = [process.wait() for process in self.processes]
        assert codes == [0] * self.size, f"workers ended with {codes}"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def make_pool(size: int, folder: Path) -> Iterator[Pool]:
    pool = Pool(size, folder)
    try:
        yield pool
        pool.close()
    finally:
        pool.kill()
