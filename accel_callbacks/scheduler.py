"""The prepared scheduler: one step for each optimizer step, on any number of processes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from accel_callbacks.loop.loop import Loop
from accel_callbacks.optimizer import AcceleratedOptimizer

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler:
    """A wrapper of a learning-rate scheduler whose ``step`` counts real optimizer steps only.

    Inside of a gradient window, and after an fp16 step that was skipped, ``step`` does nothing; a
    step after the loop over the data (for example once an epoch) always counts. The arguments are
    those of the scheduler, so that a ``ReduceLROnPlateau`` gets its metric.

    A scheduler that is no ``LRScheduler`` of torch, such as those of timm, which are told the epoch
    or the number of updates, steps at each call as it is; its state is saved and restored too.

    What ``copy`` makes of it follows the same gradient window; ``pickle`` gives the wrapped
    scheduler back.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        >>> accel = Accelerator(cpu=True)
        >>> model, optimizer, scheduler = accel.prepare(model, optimizer, scheduler)
        >>> optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.5]
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[AcceleratedOptimizer],
        loop: Loop,
        *,
        step_with_optimizer: bool = True,
        steps_at_once: int = 1,
        holds_at_end: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._optimizers = tuple(optimizers)
        self._loop = loop
        self._step_with_optimizer = step_with_optimizer
        self._steps_at_once: Iterable[int] = range(steps_at_once)
        # Asked here, because a step of a schedule is on the hot path.
        if holds_at_end and hasattr(scheduler, "total_steps"):
            self._steps_at_once = _StepsToEnd(scheduler, steps_at_once)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, if the optimizer stepped."""
        loop = self._loop
        if self._step_with_optimizer:
            if not loop.window.sync and loop.window.plugin.adjust_scheduler:
                return
            for optimizer in self._optimizers:
                # Hot path: asked of the attribute first, which says so of almost all steps.
                if (
                    optimizer.outcome is not True
                    and optimizer.step_was_skipped
                    and not loop.position.between_passes
                ):
                    loop.own_batches.note_call(self)
                    return
        for _ in self._steps_at_once:
            self.scheduler.step(*args, **kwargs)
        if loop.position.outer is None:
            loop.own_batches.note_call(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped scheduler."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __copy__(self) -> AcceleratedScheduler:
        """Return one that follows the same gradient window, over the same scheduler."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedScheduler:
        """Return one that follows the same gradient window, over copies of what is inside."""
        new = memo[id(self)] = object.__new__(type(self))
        memo[id(self._loop)] = self._loop
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has another loop: it gets the scheduler inside.
        return _get_inside, (self.scheduler,)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _get_inside(scheduler: Any) -> Any:
    return scheduler


class _StepsToEnd:
    """Steps of a schedule of a fixed length, which has no more once it is at its end."""

    def __init__(self, scheduler: Any, steps_at_once: int) -> None:
        self._scheduler = scheduler
        self._steps_at_once = steps_at_once

    def __iter__(self) -> Iterator[int]:
        for step in range(self._steps_at_once):
            if self._scheduler.last_epoch >= self._scheduler.total_steps:
                return
            yield step
