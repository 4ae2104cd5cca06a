"""Curves of a page: a series of any length in a bounded number of buckets."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["curve_of"]

Array = np.ndarray[Any, Any]


def curve_of(steps: Array, times: Array, values: Array, most: int) -> dict[str, list[Any]] | None:
    """Return a series in buckets with the mean, lowest and highest value of each.

    ``low`` and ``high`` are left out where each bucket is one value. A bucket without a finite
    value is ``None``.

    Args:
        steps: of the values, ascending.
        times: of the values, in seconds.
        values: one each step; what is not finite is left out.
        most: number of buckets.

    Returns:
        The columns ``step``, ``time``, ``mean``, ``low`` and ``high``, or ``None`` if no value is
        finite.
    """
    finite = np.isfinite(values)
    if not finite.any():
        return None
    count = min(len(values), most)
    starts = np.arange(count) * len(values) // count
    # The last step of a bucket is its place: the last point of a curve is the run's last step.
    ends = np.append(starts[1:], len(values)) - 1
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    known = np.where(finite, values, np.nan)
    # A sum of large values may overflow where their mean does not.
    weights = np.where(finite, values, 0.0) / np.repeat(np.maximum(counts, 1), ends - starts + 1)
    means = np.where(counts > 0, np.add.reduceat(weights, starts), np.nan)
    curve: dict[str, list[Any]] = {
        "step": [int(step) for step in steps[ends]],
        "time": [round(float(time), 3) for time in times[ends]],
        "mean": _numbers(means),
    }
    if count < len(values):
        curve["low"] = _numbers(np.fmin.reduceat(known, starts))
        curve["high"] = _numbers(np.fmax.reduceat(known, starts))
    return curve


def _numbers(values: Array) -> list[float | None]:
    """Return values with six digits, which no screen can tell from more, for JSON."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
