"""``get_logger`` whose ``stacklevel`` counts as in Accelerate: the adapter's own call is one."""

from __future__ import annotations

from typing import Any

from accel_callbacks import logging

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(logging.MultiProcessAdapter):
    """A logger for several processes, around which a script may put an adapter of its own."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a record; a ``stacklevel`` of 2 is that of the caller."""
        kwargs.setdefault("stacklevel", 2)
        super().log(level, msg, *args, **kwargs)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning once; a ``stacklevel`` of 3 is that of the caller."""
        kwargs.setdefault("stacklevel", 3)
        super().warning_once(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger for scripts that run on several processes.

    Args:
        name: as for :func:`logging.getLogger`.
        log_level: the lowest level to log; that of the environment, else of the logger, if None.
    """
    return MultiProcessAdapter(logging.get_logger(name, log_level).logger)
