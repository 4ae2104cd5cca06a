"""What travels from the training thread to the trackers' threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple

__all__ = ["MEDIA_BYTES", "Media", "Pending", "Reply", "Row"]

MEDIA_BYTES = 1 << 28
"""What pictures, tables, ... may hold while they wait, on their way to all and to one tracker."""

Reply = SimpleQueue[tuple[str, Any]]
"""Where the threads put (tracker, result); its methods are safe in a signal handler."""


class Row(NamedTuple):
    """One call of ``log``: Unix time, step, flat values, and keywords by tracker."""

    time: float
    step: int
    values: dict[str, Any]
    extra: Mapping[str, Mapping[str, Any]] | None = None


class Media(NamedTuple):
    """One call of ``log_images`` and so on, ready for the trackers.

    ``by_name`` says that the first argument has the name, or names, that filters look at;
    ``extra`` has keywords by tracker; ``size`` is about how many bytes it holds.
    """

    kind: str
    step: int | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool
    extra: Mapping[str, Mapping[str, Any]]
    size: int


class Pending(NamedTuple):
    """What such a call has left on its device: about how many bytes, and how to convert it."""

    size: int
    convert: Callable[[], Media]
