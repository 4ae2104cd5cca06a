"""Other processes of this machine: how one has ended, and a certain end for DataLoader workers.

torch tells its workers to end, and multiprocessing waits for them without a limit when the process
exits. A worker that is stopped obeys no signal but SIGKILL.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.util
import os
import platform
import signal
import struct
import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = [
    "end_workers",
    "end_workers_at_exit",
    "ending_of",
    "fate_of",
    "host_id",
    "stat_fields",
    "stopped_workers",
]

_PATIENCE = 2.0  # seconds for all workers together to end by themselves

# PIDFD_GET_INFO of Linux 6.15 and later, for a struct of 64 bytes: the mask of what is asked comes
# first, and the wait status, which PIDFD_INFO_EXIT asks for, last.
_GET_INFO, _INFO_EXIT, _INFO = 0xC040FF0B, 1 << 3, struct.Struct("=Q52xi")


def fate_of(pid: int, pidfd: int) -> str:
    """Describe how a process has ended.

    Args:
        pid: of the process.
        pidfd: a descriptor of it, which outlives the process.

    Example:
        >>> import os, subprocess, sys
        >>> from accel_callbacks.distributed.processes import fate_of
        >>> child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        >>> pidfd = os.pidfd_open(child.pid)
        >>> child.wait()
        3
        >>> fate_of(child.pid, pidfd).startswith(("exited with code 3", "ended without a word"))
        True
        >>> os.close(pidfd)
    """
    status = _status_of_zombie(pid)
    if status is None:
        status = _status_of_reaped(pidfd)
    if status is None:
        return "ended without a word: killed, crashed or in os._exit"
    return ending_of(os.waitstatus_to_exitcode(status))


def ending_of(code: int) -> str:
    """Describe how a process ended, by its exit code, or the negative number of a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _status_of_zombie(pid: int) -> int | None:
    """Return the wait status of a process for which its parent has not waited yet."""
    match stat_fields(pid):
        case ["Z" | "X", *fields] if len(fields) > 48:
            return int(fields[48])
    return None


def stat_fields(task: int | str | None) -> list[str]:
    """Return the state of a process and what follows it in its stat file; none if not known.

    Args:
        task: its id, or the folder below ``/proc`` of one of its threads.
    """
    with suppress(OSError):
        # After the name of the program in brackets, which may hold spaces and brackets.
        return Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
    return []


def _status_of_reaped(pidfd: int) -> int | None:
    """Return the wait status of a process for which its parent has waited, if Linux tells."""
    if sys.platform != "linux":  # no other system has pidfds
        return None
    import fcntl

    info = bytearray(_INFO.pack(_INFO_EXIT, 0))
    with suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, info)
        known, status = _INFO.unpack(info)
        return int(status) if known & _INFO_EXIT else None
    return None


@functools.cache
def host_id() -> str:
    """Identify the PID namespace, in which a process id means one process: boot id and inode."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{platform.node()}/{uuid.getnode()}"


# --- workers of DataLoaders ------------------------------------------------------------------


def stopped_workers(workers: Iterable[BaseProcess]) -> list[BaseProcess]:
    """Return the worker processes that a signal has stopped, if the system tells."""
    return [worker for worker in workers if stat_fields(worker.pid)[:1] in (["T"], ["t"])]


def end_workers(patience: float = _PATIENCE) -> None:
    """End the daemonic child processes, which multiprocessing would end at exit, for certain.

    Args:
        patience: seconds in which they may end by themselves.
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


@functools.cache  # once a process
def end_workers_at_exit() -> None:
    """End worker processes when this one exits, before multiprocessing waits for them."""
    # Before multiprocessing's own exit function, whose priority is lower.
    multiprocessing.util.Finalize(None, end_workers, exitpriority=10)
