"""Threads that work while the interpreter shuts down; a pause of the garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = [
    "ThreadForEach",
    "Worker",
    "collector_paused",
    "for_each",
    "mapped",
    "start_worker",
    "wait_for_workers",
]


T = TypeVar("T")
R = TypeVar("R")


class _Pauses:
    """The pauses of the collector that are in progress, on all threads: it is one for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_on = False
        self._watches_forks = False

    def begin(self) -> None:
        """Disable the collector; the first pause notes whether it was on."""
        with self._lock:
            if not self._watches_forks and hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._reset_after_fork)
                self._watches_forks = True
            if not self._count:
                self._was_on = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        """Enable the collector with the last pause, if it was on before the first."""
        with self._lock:
            self._count = max(0, self._count - 1)
            if not self._count and self._was_on:
                gc.enable()

    def _reset_after_fork(self) -> None:
        # a worker of a DataLoader that is forked meanwhile does not have the thread that would
        # enable its collector again
        self._lock = threading.Lock()
        if self._count and self._was_on:
            gc.enable()
        self._count = 0


_pauses = _Pauses()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector in a short block that creates no cycles.

    With 20,000 tensors, collections take as long as the rest of a load. The collector belongs to
    the process: it is off for the other threads too, until the last block that runs on any of them
    has ended.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()


class Worker:
    """A thread that runs one function, which must not raise.

    After an interrupted `Thread.join`, a second call may return at once (Python 3.11 and older
    consider the thread ended); `wait` does not.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        ended = self._ended = threading.Event()

        def work() -> None:  # no reference to self: a cycle would keep alive what `run` holds
            try:
                run()
            finally:
                ended.set()

        self._thread = threading.Thread(target=work, name="checkpoint_io")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the function has returned."""
        self._ended.wait()
        self._thread.join()


def start_worker(run: Callable[[], None]) -> Worker | None:
    """Run a function in a thread; return None if none can start, as at interpreter shutdown."""
    try:
        return Worker(run)
    except RuntimeError:
        return None


def wait_for_workers(workers: Sequence[Worker]) -> None:
    """Wait for all workers; raise an interrupt only after the last one has ended."""
    try:
        for worker in workers:
            worker.wait()
    except BaseException:
        for worker in workers:
            worker.wait()
        raise


class ThreadForEach(ThreadPoolExecutor):
    """An executor that starts a new thread for each call; meant for rare calls.

    It still works while the interpreter waits for its last threads, when thread pools already
    refuse work.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call on a new thread."""
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True, name="checkpoint-io").start()
        return future


def for_each(
    action: Callable[[int], None],
    indices: Sequence[int],
    threads: int,
    interrupted: Callable[[], None] = lambda: None,
) -> None:
    """Call `action` for each index on up to `threads` threads; raise the first error at the end.

    `interrupted` is called if the waiting thread is interrupted, so that the others can end sooner.
    """
    if threads <= 1 or len(indices) <= 1:
        for index in indices:
            action(index)
        return
    queue = _IndexQueue(action, indices)
    attempts = [start_worker(queue.work) for _ in range(min(threads, len(indices)))]
    workers = [worker for worker in attempts if worker is not None]
    if not workers:  # no thread can start: the interpreter is shutting down
        queue.work()
    try:
        for worker in workers:
            worker.wait()
    except BaseException:  # the waiting thread was interrupted
        queue.stop()
        interrupted()
        wait_for_workers(workers)
        raise
    if queue.error is not None:
        raise queue.error


def mapped(action: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return what `action` returns for each item, called as by `for_each`."""
    results: dict[int, R] = {}

    def act(index: int) -> None:
        results[index] = action(items[index])

    for_each(act, range(len(items)), threads)
    return [results[index] for index in range(len(items))]


class _IndexQueue:
    """Indices that several threads take from one list."""

    def __init__(self, action: Callable[[int], None], indices: Sequence[int]) -> None:
        self._action = action
        self._left = iter(indices)
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def stop(self) -> None:
        """Drop the remaining indices; calls in progress run to their end."""
        with self._lock:
            self._left = iter(())

    def work(self) -> None:
        """Process indices until none is left or a call fails."""
        while True:
            with self._lock:
                index = next(self._left, None)
            if index is None:
                return
            try:
                self._action(index)
            except BaseException as error:
                with self._lock:
                    self.error = self.error or error
                    self._left = iter(())
                return
