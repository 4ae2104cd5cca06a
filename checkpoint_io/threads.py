"""Threads that end; GC paused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["ThreadForEach", "for_each"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector off during a short block that makes no cycles.

    With 20,000 tensors it takes as long as all the rest of a load.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Worker:
    """Runs a function, which must not raise, in a thread.

    A `Thread.join` that was interrupted may return at once when it is called again (Python 3.11
    and before take the thread for ended); `wait` does not.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        ended = self._ended = threading.Event()

        def work() -> None:  # knows the event alone: a cycle would keep what `run` holds alive
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


def started(run: Callable[[], None]) -> Worker | None:
    """Run something in a thread; None if there can be none, as while the interpreter ends."""
    try:
        return Worker(run)
    except RuntimeError:
        return None


def wait_for(workers: Sequence[Worker]) -> None:
    """Wait until all have ended; an interrupt is raised after that."""
    try:
        for worker in workers:
            worker.wait()
    except BaseException:
        for worker in workers:
            worker.wait()
        raise


class ThreadForEach(ThreadPoolExecutor):
    """An executor with a new thread for each call, for rare calls.

    It works while the interpreter waits for its last threads, when pools take nothing any more.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call on a thread of its own."""
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
    """Call `action` for each index, on as many threads; waits for all, raises the first error.

    `interrupted` is called when the waiting thread is, so that the others can end sooner.
    """
    if threads <= 1 or len(indices) <= 1:
        for index in indices:
            action(index)
        return
    crew = _Crew(action, indices)
    begun = [started(crew.work) for _ in range(min(threads, len(indices)))]
    workers = [worker for worker in begun if worker is not None]
    if not workers:  # there are no threads any more: the interpreter is ending
        crew.work()
    try:
        for worker in workers:
            worker.wait()
    except BaseException:  # an interrupt of the waiting thread
        crew.stop()
        interrupted()
        wait_for(workers)
        raise
    if crew.error is not None:
        raise crew.error


class _Crew:
    """Threads that take indices from one list."""

    def __init__(self, action: Callable[[int], None], indices: Sequence[int]) -> None:
        self._action = action
        self._left = iter(indices)
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def stop(self) -> None:
        """Let each thread end after what it does now."""
        with self._lock:
            self._left = iter(())

    def work(self) -> None:
        """Take the next index until none is left or one fails."""
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
