"""The error classes, warnings at the line of the user, and suggestions for mistyped names."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable

__all__ = ["DistributedOperationException", "RemoteError", "ResumeError"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class RemoteError(RuntimeError):
    """Another rank failed in a block or collective that all ranks take part in.

    The message has the rank and the traceback of the rank that failed, so that the log of any one
    rank shows the cause. The failing rank itself raises its own exception.

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
    """In debug mode, the ranks were about to start different collectives; nothing was sent.

    It is raised on all ranks, and its message shows the call of each of them.

    Example:
        >>> from accel_callbacks.errors import DistributedOperationException
        >>> issubclass(DistributedOperationException, RuntimeError)
        True
    """


class ResumeError(RuntimeError):
    """A checkpoint does not fit the objects that it is loaded into; nothing was changed.

    It is also raised on the attempt to train or save after a load that failed midway.

    Example:
        >>> from accel_callbacks import ResumeError
        >>> issubclass(ResumeError, RuntimeError)
        True
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a ' Did you mean ...?' hint for a mistyped name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def warn_user(text: str) -> None:
    """Warn at the innermost line that is neither in this package nor in torch.

    Example:
        >>> import warnings
        >>> from accel_callbacks.errors import warn_user
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warn_user("the loss is nan")
        >>> str(caught[0].message)
        'the loss is nan'
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    inside = (_HERE, os.path.dirname(torch) + os.sep) if torch else (_HERE,)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
