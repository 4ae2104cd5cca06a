"""fire and simulate: call one hook of a callback, or list the hooks of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from accel_callbacks.callbacks.base import Callback, require_at_least
from accel_callbacks.callbacks.dispatch.dispatcher import Dispatcher
from accel_callbacks.callbacks.dispatch.functions import checked_hook
from accel_callbacks.callbacks.dispatch.registration import accepted, overrides
from accel_callbacks.errors import nearest
from accel_callbacks.loop.run import TrainingRun
from accel_callbacks.testing.training import TinyTraining

__all__ = ["arguments_of", "default_arguments", "fire", "simulate"]

# Prefixes of hooks, for their indentation.
_INSIDE_EPOCH = ("train_batch", "validation", "log", "test")
_INSIDE_BATCH = ("before_", "after_")


def fire(
    callback: Any, hook: str, *, run: TrainingRun | None = None, **arguments: Any
) -> TrainingRun:
    """Call one hook of a callback, with defaults for the arguments that are not given.

    The defaults are those of a small training before its start: its model and optimizer, a batch
    of two pairs of numbers, a loss of 0.5. ``setup`` is not called automatically.

    Args:
        callback: any object with the hook.
        hook: its name, with or without the ``on_``.
        run: the result of an earlier ``fire``, to continue with it; set its attributes (such as
            ``run.global_step = 7``) for a certain position. A new one if ``None``.
        **arguments: of the hook, by name.

    Returns:
        The run, to inspect: ``run.should_stop``, ``run.callback_metrics``, ...

    Raises:
        ValueError: there is no such hook, or the callback does not have it.
        TypeError: the hook has no such argument.

    Example:
        >>> from accel_callbacks.callbacks import EarlyStopping
        >>> from accel_callbacks.testing import fire
        >>> stopper = EarlyStopping("loss", patience=1)
        >>> run = fire(stopper, "log", metrics={"loss": 1.0})
        >>> run.should_stop
        False
        >>> fire(stopper, "log", run=run, metrics={"loss": 2.0}).stop_reason
        'loss did not improve on 1 in 1 checks'
    """
    name = checked_hook(hook)
    callback = accepted(callback)
    if not overrides(callback, name):
        raise ValueError(f"{type(callback).__qualname__} has no {name}.")
    known = arguments_of(name)
    for argument in arguments:
        if argument not in known:
            listed = ", ".join(known)
            raise TypeError(f"{name} has no {argument!r}, but {listed}.{nearest(argument, known)}")
    if run is None:
        run = TinyTraining().run
    values = [
        arguments[argument] if argument in arguments else default_arguments[argument](run)
        for argument in known
        if argument in arguments or argument != "dataloader_idx"
    ]
    getattr(callback, name)(run, *values)
    return run


def arguments_of(hook: str) -> list[str]:
    """Return the names of a hook's arguments after ``run``."""
    return list(inspect.signature(getattr(Callback, hook)).parameters)[2:]


def _model(run: TrainingRun) -> Any:
    return run.model


def _optimizer(run: TrainingRun) -> Any:
    return run.optimizers[0] if run.optimizers else None


def _batch(run: TrainingRun) -> torch.Tensor:
    return torch.tensor([[0.0, 1.0], [2.0, 3.0]], device=run.accelerator.device)


def _loss(run: TrainingRun) -> torch.Tensor:
    return torch.tensor(0.5, device=run.accelerator.device)


#: For each argument the function that makes its default.
default_arguments: dict[str, Callable[[TrainingRun], Any]] = {
    "model": _model,
    "stage": lambda run: "fit",
    "batch": _batch,
    "batch_idx": lambda run: 0,
    "dataloader_idx": lambda run: 0,
    "outputs": lambda run: {"loss": _loss(run)},
    "loss": _loss,
    "optimizer": _optimizer,
    "metrics": lambda run: {"train/loss": _loss(run)},
    "step": lambda run: run.global_step,
    "checkpoint": lambda run: {},
    "path": lambda run: f"checkpoints/step-{run.global_step:08d}",
    "reason": lambda run: "SIGTERM",
    "exception": lambda run: RuntimeError("an error, to try on_exception with"),
}


def simulate(
    callbacks: Iterable[Any] = (),
    epochs: int = 2,
    batches: int = 3,
    evaluate_every: int = 1,
    *,
    window: int = 1,
) -> str:
    """Return the hooks of a run in order, and the callbacks that each would call, as text.

    No callback is called, and no model is needed: the order is that of a small real training
    with ``run.epochs``, ``accumulate`` and ``evaluate``, without checkpoints.

    Args:
        callbacks: as for the Accelerator.
        epochs: of the run.
        batches: of an epoch.
        evaluate_every: evaluate after every so many epochs; never if 0.
        window: micro-batches of an optimizer step.

    Returns:
        A line for each hook: its name, the number of the epoch, batch or step, and the callbacks
        that have it, in the order of their calls.

    Raises:
        ValueError: a number is below 1 (``evaluate_every``: below 0).
        TypeError: an object is not a callback.

    Example:
        >>> from accel_callbacks.callbacks import LearningRateMonitor, Timer
        >>> from accel_callbacks.testing import simulate
        >>> print(simulate([Timer(), LearningRateMonitor()], epochs=1, batches=1))
        setup fit                   Timer:step
        fit_start                   Timer:step
        train_start                 Timer:step
          train_epoch_start 0
            train_batch_start 0
              before_backward
              after_backward
              before_optimizer_step
              after_optimizer_step 1  LearningRateMonitor
              before_zero_grad
            log train/loss 1
            train_batch_end 0       Timer:step
            validation_start        Timer:step
            validation_epoch_start
            validation_batch_start 0
            validation_batch_end 0
            validation_epoch_end
            validation_end          Timer:step
            log val/loss 1
          train_epoch_end 0         Timer:step, LearningRateMonitor
        train_end                   Timer:step
        fit_end
        teardown fit                Timer:step
    """
    require_at_least(1, epochs=epochs, batches=batches, window=window)
    require_at_least(0, evaluate_every=evaluate_every)
    called = _called(Dispatcher(callbacks))
    training = _Simulated(evaluate_every, epochs=epochs, batches=batches, window=window)
    lines = [(_indent(line) + line, called.get(line.split()[0], "")) for line in training.trace]
    return "\n".join(f"{line:26}  {names}".rstrip() for line, names in lines)


class _Simulated(TinyTraining):
    """A training that evaluates every few epochs."""

    def __init__(self, evaluate_every: int, **options: Any) -> None:
        super().__init__(evaluate=False, **options)
        self._every = evaluate_every
        self.play()

    def _train_epoch(self) -> None:
        super()._train_epoch()
        self.evaluate = self._every > 0 and (self.run.current_epoch + 1) % self._every == 0


def _called(dispatch: Dispatcher) -> dict[str, str]:
    """Return for each hook, without its ``on_``, the names of the callbacks that it calls."""
    return {
        hook.removeprefix("on_"): ", ".join(entry.name for entry in dispatch.called(hook))
        for hook in dispatch.hooks
    }


def _indent(line: str) -> str:
    """Return the indentation of a hook by its depth in the loop."""
    if line.startswith("train_epoch"):
        return "  "
    if line.startswith(_INSIDE_BATCH):
        return "      "
    return "    " if line.startswith(_INSIDE_EPOCH) else ""
