"""The prepared optimizer: steps at the end of a gradient window, and fires the hooks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from accel_callbacks.callbacks.dispatch.dispatcher import Hook
from accel_callbacks.distributed.heartbeat import remote_failure
from accel_callbacks.gradients import multiply_gradients
from accel_callbacks.loop.first_steps import OptimizerWatch
from accel_callbacks.loop.loop import Loop
from accel_callbacks.precision import Precision
from accel_callbacks.precision.base import StepFinding
from accel_callbacks.strategy import Gradients

__all__ = ["AcceleratedOptimizer"]


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A wrapper whose ``step`` and ``zero_grad`` do nothing inside of a gradient window.

    Made by ``Accelerator.prepare``. It shares ``state`` and ``param_groups`` with the wrapped
    optimizer, and is accepted wherever torch expects an ``Optimizer``. What ``copy`` makes of it
    follows the same gradient window; ``pickle`` gives the wrapped optimizer back.

    Attributes:
        outcome: of the last step: True if it was taken, False if it was skipped, a finding if only
            the device knows.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> model = torch.nn.Linear(1, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = Accelerator(cpu=True).prepare(sgd)
        >>> isinstance(optimizer, torch.optim.Optimizer), optimizer.optimizer is sgd
        (True, True)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loop: Loop,
        precision: Precision,
        watch: OptimizerWatch | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        # Without Optimizer.__init__, because the state is that of the wrapped optimizer.
        self.optimizer = optimizer
        self._loop = loop
        # Bound here, because a step is the hot path; they stay the same objects.
        self._step_state, self._position = loop.step, loop.position
        self._window, self._hooks = loop.window, loop.dispatch.hooks
        self._precision = precision
        self._watch = watch
        self._gradients = gradients or Gradients()
        # Asked once, because most have nothing to drop, and zero_grad is on the hot path.
        kind = type(self._gradients)
        self._drops_gradients = kind.drop_gradients is not Gradients.drop_gradients
        self._steps_plainly = type(precision).step is Precision.step
        self._settled_window = -1
        self.outcome: bool | StepFinding = True

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped, by fp16 or a callback.

        After an fp16 step of a fused optimizer, reading it waits for the gradients of the step.
        """
        outcome = self.outcome
        if outcome is True:
            return False
        return outcome is False or not outcome.stepped

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    def __copy__(self) -> AcceleratedOptimizer:
        """Return one that follows the same gradient window, over the same optimizer."""
        new = object.__new__(type(self))
        new.__dict__.update(
            self.__dict__,
            _watch=None,
            _gradients=Gradients(),
            _drops_gradients=False,
            outcome=not self.step_was_skipped,
        )
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedOptimizer:
        """Return one that follows the same gradient window, over a copy of the optimizer."""
        new = self.__copy__()
        memo[id(self)] = new
        new.optimizer = copy.deepcopy(self.optimizer, memo)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has another loop: it gets the optimizer inside.
        return _get_inside, (self.optimizer,)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def unscale_gradients(self) -> None:
        """Unscale the gradients and apply the window's normalization, at most once a step."""
        window = self._window
        self._precision.unscale(self.optimizer)
        if window.normalizer.active:
            window.normalizer.settle(self.optimizer)
        elif window.correction != 1.0 and self._settled_window != window.index:
            self._settled_window = window.index
            multiply_gradients(self.optimizer, window.correction)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step at the end of a gradient window; the arguments are those of the optimizer."""
        state, window = self._step_state, self._window
        if remote_failure.pending is not None:
            remote_failure.raise_in("step")
        if state.before_work is not None:
            state.before_work("step")
        if not window.sync:
            return None
        # After the question for the window: a step that does nothing is no first step.
        if self._watch is not None and not self._watch.check(
            self.optimizer, closure=bool(args or kwargs)
        ):
            self._watch = None
        if self._position.outer is None and not self._position.stages:
            self._loop.own_batches.before_step(self)
        # Hot path: without hooks or a correction, gradients are left to the precision's step.
        hooks = self._hooks["on_before_optimizer_step"]
        normalizer = window.normalizer
        if (
            hooks
            or normalizer.active
            or (window.position != window.divisor and window.correction != 1.0)
        ):
            self.unscale_gradients()
        if hooks and self._is_skipped(hooks):
            stepped: bool | StepFinding = False
            result = None
        elif self._steps_plainly:
            result = self.optimizer.step(*args, **kwargs)
            stepped = True
        else:
            stepped, result = self._precision.step(self.optimizer, args, kwargs)
        self.outcome = stepped
        state.worked = window.touched = window.stepped = True
        window.dirty = normalizer.pending = False
        after = self._hooks["on_after_optimizer_step"]
        if after and isinstance(stepped, StepFinding):
            stepped = stepped.stepped
        if stepped is True:
            state.count(self._loop.run, self)
            for hook in after:
                hook(self._loop.run, self._loop.model, self)
        elif stepped is not False:
            # The host runs one step of each optimizer ahead of the device, and no more.
            state.count_later(self._loop.run, self, stepped, ahead=len(self._loop.optimizers))
        if state.after_step is not None:
            state.after_step(self)
        return result

    def _is_skipped(self, hooks: Iterable[Hook]) -> bool:
        """Call ``on_before_optimizer_step``; return True if a callback skips this step."""
        loop, run = self._loop, self._loop.run
        run.may_skip, run.skip_reason = True, None
        try:
            for hook in hooks:
                hook(run, loop.model, self)
        finally:
            run.may_skip = False
        if run.skip_reason is None:
            return False
        self._precision.skip(self.optimizer)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, at the end of a gradient window or before its first backward."""
        window = self._window
        # It may stand before the backward or after the step: before it, only the first micro-batch
        # of a window may clear; after it, only the last.
        if not (window.sync if window.touched else window.position <= 1):
            return
        for hook in self._hooks["on_before_zero_grad"]:
            hook(self._loop.run, self._loop.model, self)
        # Discarded without a step.
        if window.normalizer.pending and self._gradients.has_gradients(self.optimizer):
            window.normalizer.forget()
        self.optimizer.zero_grad(set_to_none)
        if self._drops_gradients:
            self._gradients.drop_gradients(self.optimizer)
        if self._precision.scales_loss:
            self._precision.forget(self.optimizer)

    def train(self) -> None:
        """Switch a schedule-free optimizer to training mode."""
        self._call_if_there("train")

    def eval(self) -> None:
        """Switch a schedule-free optimizer to evaluation mode."""
        self._call_if_there("eval")

    def _call_if_there(self, name: str) -> None:
        method = getattr(self.optimizer, name, None)
        if callable(method):
            method()


def _get_inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer
