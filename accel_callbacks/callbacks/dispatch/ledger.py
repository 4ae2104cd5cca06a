"""Ledger: count the calls of each hook of each callback, and their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["MOST_ROWS", "CallbackReport", "CallbackTime", "Ledger", "Tally"]

MOST_ROWS = 64  # that a ledger holds before it adds them up


class Tally:
    """The counters of one hook of one callback."""

    __slots__ = ("calls", "longest_ns", "total_ns")

    def __init__(self) -> None:
        self.calls = 0
        self.total_ns = 0
        self.longest_ns = 0

    def add(self, spent_ns: int) -> None:
        """Count a call."""
        self.calls += 1
        self.total_ns += spent_ns
        self.longest_ns = max(self.longest_ns, spent_ns)

    def take_back(self, *args: Any) -> None:
        """Count one call less: it stands for a callback that is left out of a row of calls."""
        self.calls -= 1


@dataclass(frozen=True)
class CallbackTime:
    """The time of one hook of one callback so far; a row of a :class:`CallbackReport`.

    Args:
        callback: its name, which is its ``state_key`` if it has one.
        hook: the name of the hook.
        calls: number of calls.
        total_s: seconds in all calls, including other hooks fired inside it.
        max_s: seconds of the longest call.

    Example:
        >>> from accel_callbacks.callbacks import CallbackTime
        >>> CallbackTime("EMA", "on_after_optimizer_step", calls=4, total_s=0.2, max_s=0.1).mean_s
        0.05
    """

    callback: str
    hook: str
    calls: int
    total_s: float
    max_s: float

    @property
    def mean_s(self) -> float:
        """Mean seconds of a call, 0 without any."""
        return self.total_s / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class CallbackReport:
    """The time of the callbacks on this rank; returned by ``accel.callback_report()``.

    Args:
        rows: a :class:`CallbackTime` for each hook that was called, the slowest first.

    Example:
        >>> from accel_callbacks.callbacks import CallbackReport, CallbackTime
        >>> print(CallbackReport((CallbackTime("EMA", "on_train_end", 2, 0.003, 0.002),)))
        callback  hook          calls  total ms  mean us  max us
        EMA       on_train_end      2      3.00   1500.0  2000.0
    """

    rows: tuple[CallbackTime, ...] = ()

    @property
    def total_s(self) -> float:
        """Seconds in all hooks; a hook fired inside another counts in both."""
        return sum(row.total_s for row in self.rows)

    def __str__(self) -> str:
        lines = [("callback", "hook", "calls", "total ms", "mean us", "max us")]
        for row in self.rows:
            per_call = (f"{row.mean_s * 1e6:.1f}", f"{row.max_s * 1e6:.1f}")
            counts = (str(row.calls), f"{row.total_s * 1e3:.2f}", *per_call)
            lines.append((row.callback, row.hook, *counts))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = []
        for line in lines:
            texts = [cell.ljust(width) for cell, width in zip(line[:2], widths, strict=False)]
            numbers = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
            table.append("  ".join([*texts, *numbers]))
        return "\n".join(table)


class Ledger:
    """The tallies of all callbacks, including removed ones.

    Attributes:
        rows: calls of several callbacks that are not added up yet, at most :data:`MOST_ROWS`: their
            tallies, and the time before the first call and after each.
    """

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], Tally] = {}
        self.rows: list[tuple[Sequence[Tally], list[int]]] = []

    def tally(self, callback: str, hook: str) -> Tally:
        """Return the tally of this callback and hook, an existing one if there is one."""
        return self._tallies.setdefault((callback, hook), Tally())

    def add_up(self) -> None:
        """Add the rows to their tallies."""
        for tallies, (before, *times) in self.rows:
            for tally, time in zip(tallies, times, strict=False):  # fewer after an error
                tally.add(time - before)
                before = time
        self.rows.clear()

    def report(self) -> CallbackReport:
        """Return the times so far, the slowest first."""
        self.add_up()
        rows = [
            CallbackTime(*names, tally.calls, tally.total_ns / 1e9, tally.longest_ns / 1e9)
            for names, tally in self._tallies.items()
            if tally.calls
        ]
        return CallbackReport(tuple(sorted(rows, key=lambda row: -row.total_s)))
