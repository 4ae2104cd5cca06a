"""The options of a hub, validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["NanPolicy", "TrackerConfig"]

NanPolicy = Literal["keep", "skip", "warn", "raise"]
"""The treatment of a NaN or infinity that is logged."""


@dataclass(frozen=True)
class TrackerConfig:
    """The options of a `TrackerHub`, and of an Accelerator's trackers.

    Args:
        strict: raise a tracker's exception at the next `log`, `flush` or `finish`.
        nan_policy: "keep" NaN and infinities (default), "skip" such values, "warn" once and keep
            them, or "raise" FloatingPointError at the next `log`, `flush` or `finish`.
        flush_every_s: seconds between deliveries to the trackers, default 0.5; 0 delivers at once.
        max_buffer: rows that wait for one tracker, default 10 000; beyond, `log` waits for the
            trackers that are ``lossless``, and drops the oldest rows of the others.
        max_failures: failures of one method in a row after which a tracker is disabled, default 5.
        start_timeout_s: seconds to wait for the trackers to start, default 60. One that takes
            longer keeps starting in the background, and its rows wait.
        finish_timeout_s: maximum seconds to close the trackers, default 30.
        stall_timeout_s: seconds that `log` waits for a ``lossless`` tracker that writes nothing,
            default 30. Its oldest rows are dropped from then on. 0 never waits.

    Raises:
        ValueError: an option has an invalid value.

    Example:
        >>> TrackerConfig(nan_policy="warn").flush_every_s
        0.5
    """

    strict: bool = False
    nan_policy: NanPolicy = "keep"
    flush_every_s: float = 0.5
    max_buffer: int = 10_000
    max_failures: int = 5
    start_timeout_s: float = 60.0
    finish_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Validate the options."""
        if self.nan_policy not in get_args(NanPolicy):
            raise ValueError(
                f"nan_policy={self.nan_policy!r} is unknown: use one of {get_args(NanPolicy)}"
            )
        for name in ("max_buffer", "max_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be 1 or more")
        for name in ("flush_every_s", "start_timeout_s", "finish_timeout_s", "stall_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be 0 or more seconds")
