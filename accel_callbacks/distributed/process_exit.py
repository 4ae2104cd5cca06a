"""How another process of this machine has ended."""

from __future__ import annotations

import functools
import os
import platform
import signal
import struct
import sys
import uuid
from contextlib import suppress
from pathlib import Path

__all__ = ["fate_of", "host_id"]

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
        >>> from accel_callbacks.distributed.process_exit import fate_of
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
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _status_of_zombie(pid: int) -> int | None:
    """Return the wait status of a process for which its parent has not waited yet."""
    with suppress(OSError, IndexError, ValueError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[48]) if state in "ZX" else None
    return None


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
    """Return what only processes that see the same process ids have in common."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{platform.node()}/{uuid.getnode()}"
