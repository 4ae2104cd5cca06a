"""A gradient window whose length changes during training."""

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
    """Sets how many micro-batches an optimizer step has, from some epochs or steps on.

    Before the first of them it is what the Accelerator was given, and after the run again. A new
    length counts from the next window on. It follows from the place in the run, so a resumed run
    goes on exactly.

    Args:
        schedule: ``{epoch: micro-batches}``, with epochs from 0; or
            ``{"step": {optimizer step: micro-batches}}``, with the steps taken so far.

    Raises:
        TypeError: the schedule is no dict of whole numbers.
        ValueError: it is empty, a place is negative, or a number of micro-batches is below 1.

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
        places: Any = schedule
        self.by_step = isinstance(schedule, Mapping) and set(schedule) == {"step"}
        if self.by_step:
            places = schedule["step"]  # type: ignore[index]
        self.schedule = _checked(places)
        self._own = 1  # what the Accelerator was given

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Remember what was set before."""
        self._own = run.accumulate_grad_batches

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Stand where the run stands, which may have been resumed."""
        self._set(run)

    def on_train_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Set what begins with this epoch."""
        self._set(run)

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Set what begins with this step."""
        if self.by_step:
            self._set(run)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Set what was set before."""
        run.accumulate_grad_batches = self._own

    def _set(self, run: TrainingRun) -> None:
        here = run.global_step if self.by_step else run.current_epoch
        begun = [place for place in self.schedule if place <= here]
        wanted = self.schedule[max(begun)] if begun else self._own
        if run.accumulate_grad_batches != wanted:
            run.accumulate_grad_batches = wanted


def _checked(schedule: Any) -> dict[int, int]:
    form = "{epoch: micro-batches} or {'step': {step: micro-batches}}"
    if not isinstance(schedule, Mapping):
        raise TypeError(f"schedule={schedule!r} must be a dict, {form}.")
    if not schedule:
        raise ValueError(f"the schedule is empty: give {form}.")
    for place, count in schedule.items():
        if any(isinstance(one, bool) or not isinstance(one, int) for one in (place, count)):
            raise TypeError(f"{place!r}: {count!r} in the schedule must be whole numbers, {form}.")
        if place < 0 or count < 1:
            raise ValueError(
                f"{place}: {count} in the schedule: places count from 0, and a step has at least 1 "
                "micro-batch."
            )
    return dict(schedule)
