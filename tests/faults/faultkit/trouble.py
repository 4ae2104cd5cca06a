"""What may be done to a victim: calls that fail, a disk that fills up, another user's rights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from typing import Any

from faultkit.interpose import Call, Interposer


class Trouble:
    """What may be done to a victim between its saves, or during the next one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before: Callable[[Call], None] = _nothing

    def watch(self) -> Interposer:
        """Return what to hold during a save."""
        return Interposer(self._url, before=self._before)

    def calm(self) -> None:
        """Let calls pass again."""
        self._before = _nothing

    def fail(self, name: str, error: str, nth: int) -> None:
        """Let the calls of a name fail from the n-th on."""
        import errno

        number = getattr(errno, error)

        def failing(call: Call) -> None:
            raise OSError(number, os.strerror(number), call.path)

        self._before = from_the(name, nth, failing, repeat=True)

    def remove(self, name: str, nth: int) -> None:
        """Remove the folder at the n-th call of a name."""
        import shutil

        self._before = from_the(name, nth, lambda call: shutil.rmtree(self._url), repeat=False)

    def fill(self, name: str, disk: str) -> None:
        """Fill the disk when a file of a name is opened."""

        def filling(call: Call) -> None:
            if call.name == "open" and os.path.basename(call.path).startswith(name):
                with open(os.path.join(disk, "filler"), "ab", buffering=0) as file:
                    for size in (2**20, 2**12, 1):
                        _fill(file, bytes(size))

        self._before = filling

    def limit(self, what: int, value: int) -> None:
        """Set a limit of this process."""
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(what, (value, value))

    def become(self, user: int) -> None:
        """Become an ordinary user."""
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def _nothing(call: Call) -> None:
    """Let a call pass."""


_WRITES = ("write", "pwrite", "writev", "pwritev")
_SAME = {"write": _WRITES, "fsync": ("fsync", "fdatasync"), "replace": ("replace", "rename")}


def from_the(
    name: str, nth: int, action: Callable[[Call], Any], repeat: bool
) -> Callable[[Call], None]:
    """Act at the n-th call of a name, and at each later one if it is to be repeated."""
    names, seen = _SAME.get(name, (name,)), count()

    def before(call: Call) -> None:
        if call.name in names:
            number = next(seen)
            if number == nth or (repeat and number > nth):
                action(call)

    return before


def _fill(file: Any, block: bytes) -> None:
    """Write a block again and again until there is no room."""
    try:
        while file.write(block) == len(block):
            pass
    except OSError:
        pass
