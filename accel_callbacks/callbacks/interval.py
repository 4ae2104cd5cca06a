"""Interval and Cadence: intervals in steps, epochs, time or parts of a run, and their schedule."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from accel_callbacks.errors import nearest

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Cadence", "Interval"]

# The words that may follow a number: their unit, and how many of it one is.
_UNITS = {
    **dict.fromkeys(("step", "steps"), ("steps", 1.0)),
    **dict.fromkeys(("epoch", "epochs", "ep"), ("epochs", 1.0)),
    "run": ("run", 1.0),
    "ms": ("seconds", 0.001),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), ("seconds", 1.0)),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), ("seconds", 60.0)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600.0)),
    **dict.fromkeys(("d", "day", "days"), ("seconds", 86400.0)),
}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)?\s*([a-z]+)\s*", re.ASCII)
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):([0-5]?\d):([0-5]?\d(?:\.\d+)?)", re.ASCII)
_FORMS = "such as '100 steps', '2 epochs', '10 min', '1h 30min', '01:30:00' or '0.1 run'"


@dataclass(frozen=True)
class Interval:
    """A number of steps, epochs or seconds, or a part of the run.

    Args:
        amount: how many, above 0; whole for steps and epochs, at most 1 for a part of the run.
        unit: ``"steps"`` (of the optimizer), ``"epochs"``, ``"seconds"`` or ``"run"``.

    Raises:
        ValueError: the amount is invalid for the unit, or the unit is unknown.

    Example:
        >>> from accel_callbacks.callbacks.interval import Interval
        >>> Interval.parse("1h 30min")
        Interval(amount=5400.0, unit='seconds')
        >>> str(Interval.parse("100 steps")), str(Interval.parse("01:30:00"))
        ('100 steps', '1:30:00')
    """

    amount: float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in ("steps", "epochs", "seconds", "run"):
            raise ValueError(f"unit={self.unit!r}: use 'steps', 'epochs', 'seconds' or 'run'.")
        if not 0 < self.amount < math.inf:
            raise ValueError(f"an interval of {self.amount:g} {self.unit} must be above 0.")
        if self.unit in ("steps", "epochs") and self.amount != int(self.amount):
            raise ValueError(f"{self.amount:g} {self.unit}: give a whole number of {self.unit}.")
        if self.unit == "run" and self.amount > 1:
            raise ValueError(f"{self.amount:g} run: a part of the run is at most 1.")

    @classmethod
    def parse(cls, value: str | float | timedelta | Interval) -> Interval:
        """Parse an interval.

        Args:
            value: text such as ``"100 steps"``, ``"2 epochs"``, ``"10 min"``, ``"30s"``,
                ``"1h 30min"``, ``"01:30:00"`` (``"2:00:00:00"`` starts with days), ``"0.1 run"``,
                or ``"step"`` and ``"epoch"`` for each one; a ``timedelta``; a number of seconds.

        Raises:
            ValueError: the text is not an interval, or an empty one.
            TypeError: the value has another type.
        """
        if isinstance(value, Interval):
            return value
        if isinstance(value, timedelta):
            return cls(value.total_seconds(), "seconds")
        if isinstance(value, str):
            return _parse_text(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(
                f"{value!r} is not an interval: use text {_FORMS}, a timedelta or seconds."
            )
        return cls(float(value), "seconds")

    @classmethod
    def seconds(cls, value: str | float | timedelta | Interval, what: str = "it") -> float:
        """Parse an interval that must be a time, and return it in seconds.

        Args:
            value: as :meth:`parse` takes it.
            what: the argument's name, for the error.

        Raises:
            ValueError: the interval is not a time.

        Example:
            >>> from accel_callbacks.callbacks.interval import Interval
            >>> Interval.seconds("10 min")
            600.0
        """
        interval = cls.parse(value)
        if interval.unit != "seconds":
            raise ValueError(f"{what}={value!r} must be a time, such as '10 min' or '01:30:00'.")
        return interval.amount

    def __str__(self) -> str:
        if self.unit == "seconds":
            seconds = self.amount
            return str(timedelta(seconds=seconds)) if seconds >= 60 else f"{seconds:g} s"
        name = self.unit if self.amount != 1 or self.unit == "run" else self.unit[:-1]
        return f"{self.amount:g} {name}"


class Cadence:
    """Check repeatedly whether an interval has passed.

    Steps and epochs are due at every multiple of the number, the same in a resumed run and on all
    ranks. So are parts of a run. Time is counted from :meth:`start` or from the last time it was
    due, by the clock of this process: let one rank decide, or vote.

    Args:
        interval: as :meth:`Interval.parse` takes it.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks.interval import Cadence
        >>> run, cadence = Accelerator(cpu=True).current_run, Cadence("2 steps")
        >>> cadence.start(run)
        >>> for run.global_step in (1, 2, 2, 3, 4):
        ...     print(run.global_step, cadence.take(run))
        1 False
        2 True
        2 False
        3 False
        4 True
    """

    def __init__(self, interval: str | float | timedelta | Interval) -> None:
        self.interval = Interval.parse(interval)
        self._last_due: float | None = None

    def start(self, run: TrainingRun) -> None:
        """Restart the interval here: a run starts, or its action was done for another reason."""
        self._last_due = self._position(run)

    def is_due(self, run: TrainingRun) -> bool:
        """Return whether the interval has passed; False in the first call if not started.

        Raises:
            RuntimeError: the interval is a part of the run, and the loop is not over
                ``run.epochs``.
        """
        amount, position = self.interval.amount, self._position(run)
        if position is None:
            raise RuntimeError(
                f"the length of the run, of which {self.interval} is a part, is unknown: loop over "
                "`run.epochs(n)`, or give the interval in steps, epochs or time."
            )
        if self.interval.unit in ("steps", "epochs"):
            return position > 0 and position % amount == 0 and position != self._last_due
        if self._last_due is None:
            self._last_due = position
        if self.interval.unit == "seconds":
            return position - self._last_due >= amount
        return _floor(position / amount) > _floor(self._last_due / amount)

    def take(self, run: TrainingRun) -> bool:
        """Return whether the interval has passed; if so, start the next one."""
        due = self.is_due(run)
        if due:
            self.start(run)
        return due

    def _position(self, run: TrainingRun) -> float | None:
        if self.interval.unit == "steps":
            return run.global_step
        if self.interval.unit == "epochs":
            return run.epochs_done
        return time.monotonic() if self.interval.unit == "seconds" else _fraction_done(run)


def _fraction_done(run: TrainingRun) -> float | None:
    """Return the fraction of the run that is done, None while its length is unknown."""
    if not run.max_epochs:
        return None
    batches = run.num_training_batches
    inside = (run.batch_idx + 1) / batches if run.epoch_open and batches else 0.0
    return (run.epochs_done + min(inside, 1.0)) / run.max_epochs


def _floor(ratio: float) -> int:
    """Round down, but not below an integer that a rounding error has just missed."""
    return math.floor(ratio + 1e-9)


def _parse_text(text: str) -> Interval:
    plain = text.strip().lower()
    clock = _CLOCK.fullmatch(plain)
    if clock:
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return Interval(((days * 24 + hours) * 60 + minutes) * 60 + seconds, "seconds")
    parts = _numbers_and_units(plain, text)
    units = {unit for _, unit in parts}
    if len(units) > 1 or (len(parts) > 1 and units != {"seconds"}):
        raise ValueError(f"{text!r} mixes units that do not add up: write one interval {_FORMS}.")
    return Interval(sum(amount for amount, _ in parts), parts[0][1])


def _numbers_and_units(plain: str, text: str) -> list[tuple[float, str]]:
    parts, at = [], 0
    while at < len(plain):
        match = _PART.match(plain, at)
        if match is None:
            raise ValueError(f"{text!r} is not an interval: write one {_FORMS}.")
        number, word = match.groups()
        if word not in _UNITS:
            hint = nearest(word, _UNITS)
            raise ValueError(f"{text!r}: {word!r} is not a unit; write it {_FORMS}.{hint}")
        unit, factor = _UNITS[word]
        parts.append(((float(number) if number else 1.0) * factor, unit))
        at = match.end()
    if not parts:
        raise ValueError(f"an interval is empty: write one {_FORMS}.")
    return parts
