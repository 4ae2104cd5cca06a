"""Steps that are not taken by the ``step`` of a prepared optimizer, and count all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.gradients import parameters_of
from accel_callbacks.strategy import Strategy
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.loop import Loop

__all__ = ["UnseenSteps"]


class UnseenSteps:
    """Counts steps of which the library is not asked, once a first one was noted.

    An optimizer may have methods in place of ``step``, as those of sharpness-aware minimization
    have, which step another optimizer of theirs. And hooks of gradients may step an optimizer for
    each parameter within backward, which is one step of them all.

    Args:
        loop: counts.
        strategy: knows which models' gradients are averaged.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> inner = torch.optim.SGD([weight], 0.1)
        >>> _ = weight.register_post_accumulate_grad_hook(lambda parameter: inner.step())
        >>> with accel.run("steps in backward") as run:
        ...     accel.backward(weight.sum())
        >>> run.global_step
        1
    """

    def __init__(self, loop: Loop, strategy: Strategy) -> None:
        self._loop, self._strategy = loop, strategy
        self._task = -1  # the backward whose steps were counted
        self._told = False

    def count(self, optimizer: torch.optim.Optimizer) -> bool:
        """Count a step that was just taken by no prepared optimizer; return whether it counts.

        Raises:
            RuntimeError: it was taken inside of a gradient window.
        """
        task = torch._C._current_graph_task_id()
        if task != -1:
            if task == self._task:  # one step, of as many optimizers as there are parameters
                return True
            # A prepared optimizer is what counts, where there is one.
            if self._loop.optimizers or not self._trains_prepared(optimizer):
                return False
            self._task = task
            if not self._told:
                self._warn_of_backward(type(optimizer).__name__)
            self._note(self)
            return True
        owner = self._owner_of(optimizer)
        if owner is None:
            return False
        name = type(owner.optimizer).__name__
        if not self._loop.window.sync:
            raise RuntimeError(
                f"{name} stepped inside of a gradient window, which holds back step() alone: each "
                "micro-batch would be a step. Step it `if accel.sync_gradients:`, or set "
                "gradient_accumulation_steps=1."
            )
        self._note(owner)
        for hook in self._loop.dispatch.hooks["on_after_optimizer_step"]:
            hook(self._loop.run, self._loop.model, owner)
        if self._loop.step.after_step is not None:
            self._loop.step.after_step(owner)
        return True

    def _note(self, stepped: Any) -> None:
        loop = self._loop
        loop.step.worked = loop.window.touched = loop.window.stepped = True
        loop.window.dirty = False
        loop.step.count(loop.run, stepped)

    def _warn_of_backward(self, name: str) -> None:
        """Warn once of what steps within backward cannot wait for."""
        self._told = True
        window, ranks = self._loop.window, self._strategy.data.world
        if window.num_steps > 1:
            warn(
                f"{name} steps within backward, and so in each micro-batch of a gradient window, "
                f"by 1/{window.num_steps} of its gradients: set gradient_accumulation_steps=1, or "
                "step a prepared optimizer after accel.backward()."
            )
        if any(map(self._strategy.gradients.averages, self._loop.models)):
            warn(
                f"{name} steps within backward, before gradients are averaged over the {ranks} "
                "processes, so that each trains a model of its own: step a prepared optimizer "
                "after accel.backward(), or shard the model (FSDP2), whose gradients are averaged "
                "by then."
            )

    def _trains_prepared(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer trains a prepared model, or whatever there is if none is."""
        models = self._loop.models
        held = {id(parameter) for model in models for parameter in model.parameters()}
        return not models or any(id(parameter) in held for parameter in parameters_of([optimizer]))

    def _owner_of(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the prepared optimizer that has another one as a part, None if none has."""
        for owner in self._loop.optimizers:
            inner = getattr(owner, "optimizer", owner)
            if any(part is optimizer for part in vars(inner).values()):
                return owner
        return None
