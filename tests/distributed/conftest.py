"""A pool of real processes over gloo, started once for each test module."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support import warm
from tests.support.ports import free_port

WORKER = Path(__file__).with_name("worker.py")
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
        results = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(60):
                self._fail(f"rank {rank} hangs in {function.__name__}")
            try:
                results.append(connection.recv())
            except (EOFError, OSError):
                code = self.processes[rank].wait(30)
                text = f"rank {rank} ended with {code} in {function.__name__}"
                self._fail(text, Crash if code in CRASHES else AssertionError)
        return results

    def _fail(self, text: str, kind: type[AssertionError] = AssertionError) -> NoReturn:
        self.kill()
        self._start()  # or each test after this one would fail too
        raise kind(text)

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
        codes = [process.wait(30) for process in self.processes]
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One process, for what would otherwise start many, each with the imports anew."""
    yield from make_pool(1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two processes."""
    yield from make_pool(2, tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def pool_of_4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four processes."""
    yield from make_pool(4, tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def pool_of_8(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Eight processes, for slow tests of three axes."""
    yield from make_pool(8, tmp_path_factory.mktemp("pool"))
