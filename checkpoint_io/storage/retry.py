"""How often, how fast and how long a request to a store is tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Bounds of one request and its repetitions; only transient failures are repeated.

    Attributes:
        attempts: how often it is tried in all.
        base_delay: seconds before the second try; doubled each time, less a random part.
        max_delay: longest pause in seconds.
        deadline: seconds after which no further try begins.
        connect_timeout: seconds that connecting may take.
        read_timeout: seconds without an answer, for each 16 MiB sent or asked for, after which a
            try counts as stalled.
    """

    attempts: int = 9
    base_delay: float = 0.2
    max_delay: float = 10.0
    deadline: float = 600.0
    connect_timeout: float = 10.0
    read_timeout: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if self.attempts < 1:
            raise ValueError(f"attempts must be 1 or more, not {self.attempts}")
        if min(self.connect_timeout, self.read_timeout, self.deadline) <= 0:
            raise ValueError("timeouts and the deadline must be longer than 0 seconds")


class Attempts:
    """Counts the tries of one request."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._begin = time.monotonic()
        self.made = 0

    def pause(self) -> float | None:
        """Return how long to wait before the next try, None if there should be none."""
        self.made += 1
        delay = min(self._policy.base_delay * 2.0 ** (self.made - 1), self._policy.max_delay)
        delay *= random.uniform(0.5, 1.0)  # many ranks must not come back all at once
        if self.made >= self._policy.attempts or self.elapsed + delay > self._policy.deadline:
            return None
        return delay

    @property
    def elapsed(self) -> float:
        """Return the seconds since the first try began."""
        return time.monotonic() - self._begin

    def describe(self) -> str:
        """Say how much was tried, for an error."""
        times = "once" if self.made == 1 else f"{self.made} times"
        return f"tried {times} in {self.elapsed:.1f} s"


def retry(
    policy: RetryPolicy, action: Callable[[], T], transient: Callable[[Exception], bool]
) -> T:
    """Run an action, again while it fails for a reason that may pass; raises its last error."""
    attempts = Attempts(policy)
    while True:
        try:
            return action()
        except Exception as error:
            pause = attempts.pause() if transient(error) else None
            if pause is None:
                raise
            time.sleep(pause)
