"""The error classes, and nearest-name suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["DistributedOperationException", "RemoteError", "ResumeError"]


class RemoteError(RuntimeError):
    """Another process failed inside a block that all processes meet at.

    The message holds the rank and the traceback of the process that failed, so that the log of
    any one rank tells the whole story. The failing rank itself raises its own exception.

    Example:
        >>> from accel_callbacks import RemoteError
        >>> raise RemoteError(rank=1, where="synchronize", details="ValueError: no such file")
        Traceback (most recent call last):
        accel_callbacks.errors.RemoteError: rank 1 failed in synchronize: ValueError: no such file
    """

    def __init__(self, *, rank: int, where: str, details: str) -> None:
        super().__init__(f"rank {rank} failed in {where}: {details}")
        self.rank = rank
        self.where = where


class DistributedOperationException(RuntimeError):
    """In debug mode: the processes were about to do different things; nothing was sent.

    It is raised on all processes, and its message shows what each of them has.

    Example:
        >>> from accel_callbacks.errors import DistributedOperationException
        >>> issubclass(DistributedOperationException, RuntimeError)
        True
    """


class ResumeError(RuntimeError):
    """A checkpoint does not fit the objects it should be loaded into; nothing was changed.

    Also raised by what would go on computing after a load that broke off half-way.

    Example:
        >>> from accel_callbacks import ResumeError
        >>> issubclass(ResumeError, RuntimeError)
        True
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """A ' Did you mean ...?' hint for a mistyped name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
