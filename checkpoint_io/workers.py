"""A thread that does one thing, and that can be waited for whatever interrupts the waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


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
