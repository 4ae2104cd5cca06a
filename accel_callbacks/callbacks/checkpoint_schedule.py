"""When a Checkpoint saves: after steps, after epochs, or by a clock that one process reads."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from accel_callbacks.callbacks.interval import Cadence, Interval

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["Every", "Schedule"]

Every = str | float | timedelta | Interval


class Schedule:
    """The intervals of a Checkpoint.

    Args:
        every_n_steps: optimizer steps.
        every_n_epochs: epochs.
        every_seconds: a time.
        every: one of them, or a part of the run, as text.

    Attributes:
        is_empty: no interval was given.
        needs_votes: time and parts of the run are measured on the main process, whose decision
            the others follow by a vote.

    Raises:
        ValueError: an interval of nothing, or one that is given twice.

    Example:
        >>> from accel_callbacks.callbacks.checkpoint_schedule import Schedule
        >>> schedule = Schedule(every="100 steps")
        >>> schedule.step_is_due(200), schedule.step_is_due(250), schedule.needs_votes
        (True, False, False)
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        every_seconds: Every | None = None,
        every: Every | None = None,
    ) -> None:
        for name, count in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
            if count is not None and count < 1:
                raise ValueError(f"{name}={count} must be at least 1.")
        self._steps, self._epochs = every_n_steps, every_n_epochs
        self._clock: Cadence | None = None
        if every_seconds is not None:
            self._clock = Cadence(Interval.seconds(every_seconds, "every_seconds"))
        if every is not None:
            self._take(every)

    def _take(self, every: Every) -> None:
        """``every`` stands for one of the others."""
        if isinstance(every, (int, float)):
            raise ValueError(f"every={every!r} has no unit: write '{every} steps' or '{every} s'.")
        interval = Interval.parse(every)
        name = {"steps": "every_n_steps", "epochs": "every_n_epochs"}.get(interval.unit)
        others = {"every_n_steps": self._steps, "every_n_epochs": self._epochs}
        if (self._clock if name is None else others[name]) is not None:
            raise ValueError(f"every={every!r} and {name or 'every_seconds'}: give one of the two.")
        if interval.unit == "steps":
            self._steps = int(interval.amount)
        elif interval.unit == "epochs":
            self._epochs = int(interval.amount)
        else:
            self._clock = Cadence(interval)

    @property
    def is_empty(self) -> bool:
        """No interval was given."""
        return self._steps is None and self._epochs is None and self._clock is None

    @property
    def needs_votes(self) -> bool:
        """The processes could not agree without one."""
        return self._clock is not None

    @property
    def clock(self) -> str:
        """The interval by the clock, as text; empty if there is none."""
        return "" if self._clock is None else f"every {self._clock.interval}"

    def step_is_due(self, step: int, saved_step: int | None = None) -> bool:
        """Whether a step interval is over at this step, which is not saved yet."""
        return self._steps is not None and 0 < step != saved_step and step % self._steps == 0

    def epoch_is_due(self, epochs_done: int) -> bool:
        """Whether an epoch interval is over."""
        return self._epochs is not None and epochs_done % self._epochs == 0

    def clock_is_due(self, run: TrainingRun) -> bool:
        """On the main process: whether the clock says that it is time; False on the others."""
        return self._clock is not None and run.is_global_zero and self._clock.is_due(run)

    def restart_clock(self, run: TrainingRun) -> None:
        """A run begins, or something was saved: the time counts from here."""
        if self._clock is not None:
            self._clock.start(run)
