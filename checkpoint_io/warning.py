"""Warnings that point at the user's line, however deep in a library they are raised."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

__all__ = ["warn"]

# No user's line is in these: this library, what it is called through, and what starts threads.
_INTERNAL = {
    *("accel_callbacks", "checkpoint_io", "loggers"),
    *("torch", "lightning", "pytorch_lightning", "transformers"),
    *("asyncio", "concurrent", "contextlib", "functools", "multiprocessing", "threading"),
}


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning with the innermost line that is the user's.

    Without such a line, as on a thread of ours, it has none: Python shows ``sys:1`` then.

    Args:
        text: what happened, and what to do next.
        category: ``UserWarning`` by default.
    """
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_internal(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _is_internal(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL
