"""GradientAccumulationScheduler: change the number of micro-batches during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.callbacks.base import Callback

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["GradientAccumulationScheduler"]

Schedule = Mapping[int, int]


class GradientAccumulationScheduler(Callback):
    """Set the micro-batches of an optimizer step from given epochs or steps on.

    Before the first of them and after the run, the Accelerator's own number holds. A new number
    takes effect with the next gradient window. It depends only on the position in the run, so a
    resumed run continues exactly.

    Args:
        schedule: ``{epoch: micro-batches}``, with epochs from 0; or
            ``{"step": {optimizer step: micro-batches}}``, with the steps taken so far.

    Raises:
        TypeError: the schedule is not a dict of integers.
        ValueError: it is empty, an epoch or step is negative, or a number of micro-batches is
            below 1.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import GradientAccumulationScheduler
        >>> schedule = GradientAccumulationScheduler({0: 1, 2: 4})
        >>> accel = Accelerator(cpu=True, callbacks=[schedule])
        >>> with accel.run("demo") as run:
        ...     for epoch in run.epochs(3):
        ...         print(accel.gradient_accumulation_steps)
        1
        1
        4
    """

    def __init__(self, schedule: Schedule | Mapping[str, Schedule]) -> None:
        starts: Any = schedule
        self.by_step = isinstance(schedule, Mapping) and set(schedule) == {"step"}
        if self.by_step:
            starts = schedule["step"]  # type: ignore[index]
        self.schedule = _check_schedule(starts)
        self._default = 1  # that of the Accelerator

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Remember the Accelerator's own number."""
        self._default = run.accumulate_grad_batches

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Set the number for the position of the run, which may have been resumed."""
        self._set(run)

    on_train_epoch_start = on_fit_start

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Set the number for the next step."""
        if self.by_step:
            self._set(run)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Restore the Accelerator's own number."""
        run.accumulate_grad_batches = self._default

    def _set(self, run: TrainingRun) -> None:
        position = run.global_step if self.by_step else run.current_epoch
        past = [start for start in self.schedule if start <= position]
        wanted = self.schedule[max(past)] if past else self._default
        if run.accumulate_grad_batches != wanted:
            run.accumulate_grad_batches = wanted


def _check_schedule(schedule: Any) -> dict[int, int]:
    form = "{epoch: micro-batches} or {'step': {step: micro-batches}}"
    if not isinstance(schedule, Mapping):
        raise TypeError(f"schedule={schedule!r} must be a dict, {form}.")
    if not schedule:
        raise ValueError(f"the schedule is empty: give {form}.")
    for start, count in schedule.items():
        if any(
            isinstance(number, bool) or not isinstance(number, int) for number in (start, count)
        ):
            raise TypeError(f"{start!r}: {count!r} in the schedule must be integers, {form}.")
        if start < 0 or count < 1:
            raise ValueError(
                f"{start}: {count} in the schedule: epochs and steps count from 0, and a step has "
                "at least 1 micro-batch."
            )
    return dict(schedule)
