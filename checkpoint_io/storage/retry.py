"""Retry requests to a store: number of attempts, backoff, deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})  # of HTTP


@dataclass(frozen=True)
class RetryPolicy:
    """Bounds of one request and its retries; only transient failures are retried.

    Attributes:
        attempts: total number of attempts.
        base_delay: seconds before the second attempt; doubled each time, less a random part.
        max_delay: longest pause in seconds.
        deadline: seconds after which no further attempt begins.
        connect_timeout: seconds that connecting may take.
        read_timeout: seconds without an answer, for each 16 MiB sent or requested, after which an
            attempt counts as stalled.
    """

    attempts: int = 9
    base_delay: float = 0.2
    max_delay: float = 10.0
    deadline: float = 600.0
    connect_timeout: float = 10.0
    read_timeout: float = 60.0

    def __post_init__(self) -> None:
        """Raise ValueError for bounds under which no attempt could succeed."""
        if self.attempts < 1:
            raise ValueError(f"attempts must be 1 or more, not {self.attempts}")
        if min(self.connect_timeout, self.read_timeout, self.deadline) <= 0:
            raise ValueError("timeouts and the deadline must be longer than 0 seconds")


class Attempts:
    """Counts the attempts of one request."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._begin = time.monotonic()
        self.made = 0

    def pause(self) -> float | None:
        """Return the seconds to wait before the next attempt, None if there should be none."""
        self.made += 1
        delay = min(self._policy.base_delay * 2.0 ** (self.made - 1), self._policy.max_delay)
        delay *= random.uniform(0.5, 1.0)  # jitter: many ranks must not retry all at once
        if self.made >= self._policy.attempts or self.elapsed + delay > self._policy.deadline:
            return None
        return delay

    @property
    def elapsed(self) -> float:
        """Return the seconds since the first attempt began."""
        return time.monotonic() - self._begin

    def describe(self) -> str:
        """Return number and duration of the attempts, for an error message."""
        times = "once" if self.made == 1 else f"{self.made} times"
        return f"tried {times} in {self.elapsed:.1f} s"


def retry(
    policy: RetryPolicy, action: Callable[[], T], transient: Callable[[Exception], bool]
) -> T:
    """Run an action until it succeeds; retry transient errors and raise the last one."""
    attempts = Attempts(policy)
    while True:
        try:
            return action()
        except Exception as error:
            pause = attempts.pause() if transient(error) else None
            if pause is None:
                raise
            time.sleep(pause)
