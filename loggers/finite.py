"""What becomes of NaN and infinities on their way to the trackers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from loggers.config import NanPolicy

__all__ = ["apply_nan_policy"]


def apply_nan_policy(
    rows: Iterable[tuple[int, dict[str, Any]]], policy: NanPolicy
) -> tuple[str, int, float] | None:
    """Drop non-finite values where the policy is "skip"; return the first as (name, step, value).

    Args:
        rows: steps and flat values, read from their devices; changed in place.
        policy: "keep" does not even look.

    >>> row = {"loss": float("nan"), "lr": 0.1}
    >>> apply_nan_policy([(3, row)], "skip"), row
    (('loss', 3, nan), {'lr': 0.1})
    """
    first: tuple[str, int, float] | None = None
    if policy == "keep":
        return first
    for step, values in rows:
        bad = [
            name
            for name, value in values.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        if bad and first is None:
            first = (bad[0], step, values[bad[0]])
        if policy == "skip":
            for name in bad:
                del values[name]
    return first
