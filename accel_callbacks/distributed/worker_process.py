"""Worker processes of DataLoaders, ended whatever state they are in.

torch tells its workers to end, and multiprocessing waits for them without a limit when the process
exits. A worker that is stopped obeys no signal but SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["end_workers", "end_workers_at_exit", "stopped_workers"]

_PATIENCE = 2.0  # seconds for all workers together to end by themselves
_exit_hook_set = False


def stopped_workers(workers: Iterable[BaseProcess]) -> list[BaseProcess]:
    """Return the worker processes that a signal has stopped, if the system tells.

    Example:
        >>> import multiprocessing
        >>> from accel_callbacks.distributed.worker_process import stopped_workers
        >>> stopped_workers(multiprocessing.active_children())
        []
    """
    return [worker for worker in workers if _is_stopped(worker.pid)]


def _is_stopped(pid: int | None) -> bool:
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "Tt"
    return False


def end_workers(patience: float = _PATIENCE) -> None:
    """End the daemonic child processes, which multiprocessing would end at exit, for certain.

    Args:
        patience: seconds in which they may end by themselves.

    Example:
        >>> from accel_callbacks.distributed.worker_process import end_workers
        >>> end_workers()
    """
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    deadline = time.monotonic() + patience
    for worker in workers:
        if patience > 0:
            worker.terminate()
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()


def end_workers_at_exit() -> None:
    """End worker processes when this one exits, before multiprocessing waits for them.

    Example:
        >>> from accel_callbacks.distributed.worker_process import end_workers_at_exit
        >>> end_workers_at_exit()
    """
    global _exit_hook_set
    if not _exit_hook_set:
        multiprocessing.util.Finalize(None, end_workers, exitpriority=10)
        _exit_hook_set = True
