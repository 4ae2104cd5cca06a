"""No process outlives its launcher, not even one that is killed with SIGKILL.

A small process of its own waits for the launcher to end. If the launcher did not say good-bye, it
ends what carries the mark of the launch in its environment: processes, and what they started.
It costs the processes themselves nothing, and works for programs that are not Python.
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
_GRACE = 30.0  # as torch's launcher gives on SIGTERM


@contextmanager
def guarded() -> Iterator[dict[str, str]]:
    """Watch over this process inside of the block; yields the variables that children must get.

    Only on Linux, where a process can read the environment of others. Elsewhere it yields nothing.

    Example:
        >>> from accel_callbacks.launch.watchdog import guarded
        >>> with guarded() as variables:
        ...     len(variables) <= 1
        True
    """
    if sys.platform != "linux":
        yield {}
        return
    from subprocess import DEVNULL, PIPE, Popen

    mark = os.urandom(8).hex()
    command = [sys.executable, "-I", "-S", __file__, mark]
    # Its own session: Ctrl-C in the terminal is for the launcher, which then ends it.
    with Popen(
        command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
    ) as keeper:
        try:
            yield {MARK: mark}
        finally:
            if keeper.stdin is not None:
                with suppress(OSError):  # somebody ended it
                    keeper.stdin.write(b".")
                    keeper.stdin.close()


def end_marked(mark: str, grace: float = _GRACE) -> None:
    """End all processes of a launch: with SIGTERM, and with SIGKILL what is left after a while.

    Example:
        >>> from accel_callbacks.launch.watchdog import end_marked
        >>> end_marked("of no launch")
    """
    text = f"{MARK}={mark}".encode()
    told: set[int] = set()
    deadline = time.monotonic() + grace
    while alive := _marked(text):
        late = time.monotonic() > deadline
        for pid in alive if late else alive - told:
            _send(pid, signal.SIGKILL if late else signal.SIGTERM)
        told |= alive
        time.sleep(0.1)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(OSError):  # gone already, or a program that became another user's
        os.kill(pid, number)


def _marked(text: bytes) -> set[int]:
    """Processes other than this one that carry the mark and have not ended."""
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as variables:
                if text in variables.read().split(b"\0"):
                    found.add(int(name))
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not os.read(0, 1):
        end_marked(sys.argv[1])


if __name__ == "__main__":
    _main()
