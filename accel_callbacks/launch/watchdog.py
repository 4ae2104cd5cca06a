"""End all processes of a launch with their launcher, even if that is killed by SIGKILL.

A watchdog process waits for the launcher to end. Unless the launcher exited in order, the watchdog
ends every process that has the mark of the launch in its environment, which children inherit. The
processes themselves pay nothing for it, and need not be Python.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["MARK", "end_marked", "guarded"]

MARK = "ACCEL_LAUNCH_ID"
_GRACE = 30.0  # seconds from SIGTERM to SIGKILL, as in torch's launcher


@contextmanager
def guarded() -> Iterator[dict[str, str]]:
    """Run a watchdog during the block; yield the variables that children must get.

    Linux only, where a process can read the environment of others; elsewhere there are none.
    """
    if sys.platform != "linux":
        yield {}
        return
    from subprocess import DEVNULL, PIPE, Popen

    mark = os.urandom(8).hex()
    command = [sys.executable, "-I", "-S", __file__, mark]
    # In its own session, so that Ctrl-C in the terminal reaches only the launcher.
    with Popen(
        command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
    ) as watchdog:
        try:
            yield {MARK: mark}
        finally:
            if watchdog.stdin is not None:
                with suppress(OSError):  # the watchdog was killed
                    watchdog.stdin.write(b".")
                    watchdog.stdin.close()


def end_marked(mark: str, grace: float = _GRACE) -> None:
    """End all processes of a launch with SIGTERM, and with SIGKILL after a grace period."""
    if sys.platform != "linux":
        return
    text = f"{MARK}={mark}".encode()
    signalled: set[int] = set()
    deadline = time.monotonic() + grace
    while alive := _find_marked(text):
        late = time.monotonic() > deadline
        for pid in alive if late else alive - signalled:
            _send(pid, signal.SIGKILL if late else signal.SIGTERM)
        signalled |= alive
        time.sleep(0.1)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(OSError):  # already ended, or a setuid program
        os.kill(pid, number)


def _find_marked(text: bytes) -> set[int]:
    """Return the running processes with the mark in their environment, except this one."""
    pids = set()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as variables:
                if text in variables.read().split(b"\0"):
                    pids.add(int(name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return pids


def _main() -> None:
    if sys.platform == "win32":  # never started there
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not os.read(0, 1):
        end_marked(sys.argv[1])


if __name__ == "__main__":
    _main()
