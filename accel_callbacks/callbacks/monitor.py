"""Monitor: read a logged metric, and compare its values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["Monitor"]


class Monitor:
    """The name of a logged metric and the direction in which it improves.

    Args:
        name: as given to ``accel.log``.
        mode: ``"min"`` or ``"max"``.
        min_delta: smallest change that counts as better, at least 0.

    Raises:
        ValueError: an unknown mode or a negative ``min_delta``.

    Example:
        >>> from accel_callbacks.callbacks.monitor import Monitor
        >>> Monitor("val/loss").is_better(0.5, than=0.7)
        True
    """

    def __init__(self, name: str, mode: str = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} is unknown; use 'min' or 'max'.")
        if min_delta < 0:
            raise ValueError(f"min_delta={min_delta} must not be negative.")
        self.name = name
        self.mode = mode
        self.min_delta = min_delta

    def read(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the value as a float, ``None`` if it was not logged. Waits for the device."""
        value = metrics.get(self.name)
        return None if value is None else float(value)

    def is_better(self, value: float, *, than: float | None) -> bool:
        """Return whether ``value`` improves on ``than``; NaN never does."""
        if math.isnan(value):
            return False
        if than is None or math.isnan(than):
            return True
        gain = than - value if self.mode == "min" else value - than
        return gain > self.min_delta
