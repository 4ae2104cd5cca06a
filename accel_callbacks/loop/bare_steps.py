"""Steps of optimizers that are not prepared, which nothing holds back in a gradient window."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_callbacks.gradients import first_elements, has_gradients, parameters_of
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.unprepared_steps import attach, in_prepared_step
from accel_callbacks.precision import Precision
from accel_callbacks.strategy import Strategy
from checkpoint_io.warning import warn

__all__ = [
    "BareSteps",
    "UnseenSteps",
]

_STEPS = 12  # of all optimizers together, of which there may be several
_AVERAGING = {"DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"}


class BareSteps:
    """Watches the steps of all optimizers, from the first backward on, and warns of bare ones.

    Args:
        loop: has the gradient window and what is prepared.
        strategy: knows over how many ranks gradients should be averaged.
        precision: may scale losses.
        warn: warns once of a kind of mistake.
        on_finish: called at the end of the watch.

    Example:
        >>> import torch, warnings
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> model = accel.prepare(model)
        >>> with accel.accumulate(model), warnings.catch_warnings(record=True) as caught:
        ...     accel.backward(model(torch.ones(1, 1)).sum())
        ...     optimizer.step()
        >>> "optimizer = accel.prepare(optimizer)" in str(caught[0].message)
        True
    """

    def __init__(
        self,
        loop: Loop,
        strategy: Strategy,
        precision: Precision,
        warn: Callable[[str, str], None],
        on_finish: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._strategy = strategy
        self._precision = precision
        self._warn = warn
        self._on_finish = on_finish
        self._remove: Callable[[], Any] | None = None
        self.renew()

    def renew(self) -> None:
        """Watch from the next backward on, as for the first time."""
        self._left = _STEPS
        # Without a prepared model: an optimizer that stepped, and whether a backward reached it.
        self._own: ref[torch.optim.Optimizer] | None = None
        self._reached = False
        self._gradients: list[torch.Tensor] = []
        self._versions: list[tuple[int, int]] = []

    def finish(self) -> None:
        """Remove the hook."""
        self._left = 0
        self._own, self._gradients = None, []
        if self._remove is not None:
            self._remove()
            self._remove = None
        self._on_finish()

    def before_backward(self) -> None:
        """Note the gradients before ``accel.backward``."""
        self._versions = _versions(self._alone())

    def note_backward(self) -> None:
        """Note that ``accel.backward`` has run."""
        if self._left <= 0:  # not at the step itself, where torch iterates over the hooks
            self.finish()
        elif self._remove is None:
            self._remove = attach(register_optimizer_step_pre_hook, self._check)
        self._reached = self._versions != _versions(self._alone())
        self._note_gradients()

    @contextmanager
    def clipping(self) -> Iterator[None]:
        """Context manager: the library changes gradients, which does not average them."""
        if self._gradients and not self._has_kept():
            self._left = 0  # the script has changed them
        yield
        self._note_gradients()

    def _alone(self) -> torch.optim.Optimizer | None:
        """Return the optimizer that stepped without a prepared model."""
        return None if self._own is None else self._own()

    def _note_gradients(self) -> None:
        self._gradients = _sample(self._alone())

    def _has_kept(self) -> bool:
        """Return whether the gradients are those of the last backward or clipping."""
        before, now = self._gradients, _sample(self._alone())
        return len(before) == len(now) and all(map(torch.equal, before, now))

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the step of any optimizer of the process."""
        # Within backward, each parameter may have an optimizer of its own.
        if self._left <= 0 or torch._C._current_graph_task_id() != -1 or in_prepared_step():
            return
        self._left -= 1
        trained = _parameters([optimizer])
        inside = [getattr(prepared, "optimizer", prepared) for prepared in self._loop.optimizers]
        # One that shares parameters with a prepared optimizer is a part of it, as of SAM.
        if not any(known is optimizer for known in inside) and trained & _parameters(inside):
            return
        models = self._loop.models
        if models:
            if trained & {id(p) for model in models for p in model.parameters()}:
                self._check_window(optimizer)
        elif not self._reached:
            # It may have nothing to do with this Accelerator: the next backward tells.
            self._own = ref(optimizer)
        elif self._alone() is optimizer:
            self._check_apart(trained)
            self._check_window(optimizer)
        self._reached = self._reached and self._alone() is not optimizer

    def _check_window(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of a step between the micro-batches of a window, or with scaled gradients."""
        window, scaler = self._loop.window, self._precision.scaler
        if not window.touched:
            return
        name = type(optimizer).__name__
        if window.is_open:
            wrong = f"steps after each micro-batch, not once in {window.divisor}"
        elif (
            self._precision.scales_loss
            and scaler is not None
            and id(optimizer) not in scaler._per_optimizer_states
            and has_gradients(optimizer)
        ):
            wrong = f"steps with gradients that are still scaled for {self._precision.name}"
        else:
            return
        prepared = "optimizer = accel.prepare(optimizer)"
        if not self._loop.models and not self._loop.optimizers:
            prepared = "model, optimizer = accel.prepare(model, optimizer)"
        self._warn(
            "bare step",
            f"{name} {wrong}, because it is not the optimizer that accel.prepare returned: "
            f"write `{prepared}` before the loop, and step that one.",
        )
        self._left = 0

    def _check_apart(self, trained: Collection[int]) -> None:
        """Warn of gradients without a prepared model, which stay on their rank."""
        ranks = self._strategy.data.world
        # A script may average by itself, or wrap the model by itself.
        if ranks > 1 and self._has_kept() and not _is_wrapped(trained):
            self._warn(
                "bare model",
                f"no model is prepared, so that the {ranks} processes do not average their "
                "gradients and train different models: write `model, optimizer, loader = "
                "accel.prepare(model, optimizer, loader)` before the loop. If each process is to "
                "train a model of its own, call loss.backward() instead of accel.backward(loss).",
            )
            self._left = 0


def _parameters(optimizers: Collection[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for p in parameters_of(optimizers) if p.requires_grad}


def _gradients(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    optimizers = [] if optimizer is None else [optimizer]
    return [p.grad for p in parameters_of(optimizers) if p.grad is not None]


def _versions(optimizer: torch.optim.Optimizer | None) -> list[tuple[int, int]]:
    return [(id(gradient), gradient._version) for gradient in _gradients(optimizer)]


def _sample(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return copies of the first elements of each gradient."""
    dense = (gradient for gradient in _gradients(optimizer) if not gradient.is_sparse)
    return [first_elements(gradient) for gradient in dense]


def _is_wrapped(parameters: Collection[int]) -> bool:
    """Return whether a wrapper of the user's averages the gradients of one of the parameters."""
    # Only a walk over all objects finds it; this happens once, before a warning.
    wrappers = (module for module in gc.get_objects() if type(module).__name__ in _AVERAGING)
    return any(
        id(parameter) in parameters for module in wrappers for parameter in module.parameters()
    )


# --- steps that are not taken by the ``step`` of a prepared optimizer, and count all the same ----


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
