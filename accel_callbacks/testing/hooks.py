"""fire: call one hook of a callback by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.dispatch.functions import checked_hook
from accel_callbacks.callbacks.dispatch.registration import accepted, overrides
from accel_callbacks.errors import nearest
from accel_callbacks.loop.run import TrainingRun
from accel_callbacks.testing.training import TinyTraining

__all__ = ["arguments_of", "fire"]


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
        arguments[argument] if argument in arguments else _DEFAULTS[argument](run)
        for argument in known
        if argument in arguments or argument != "dataloader_idx"
    ]
    getattr(callback, name)(run, *values)
    return run


def arguments_of(hook: str) -> list[str]:
    """Return the names of a hook's arguments after ``run``."""
    return list(inspect.signature(getattr(Callback, hook)).parameters)[2:]


def _batch(run: TrainingRun) -> torch.Tensor:
    return torch.tensor([[0.0, 1.0], [2.0, 3.0]], device=run.accelerator.device)


def _loss(run: TrainingRun) -> torch.Tensor:
    return torch.tensor(0.5, device=run.accelerator.device)


#: For each argument the function that makes its default.
_DEFAULTS: dict[str, Callable[[TrainingRun], Any]] = {
    "model": lambda run: run.model,
    "stage": lambda run: "fit",
    "batch": _batch,
    "batch_idx": lambda run: 0,
    "dataloader_idx": lambda run: 0,
    "outputs": lambda run: {"loss": _loss(run)},
    "loss": _loss,
    "optimizer": lambda run: run.optimizers[0] if run.optimizers else None,
    "metrics": lambda run: {"train/loss": _loss(run)},
    "step": lambda run: run.global_step,
    "checkpoint": lambda run: {},
    "path": lambda run: f"checkpoints/step-{run.global_step:08d}",
    "reason": lambda run: "SIGTERM",
    "exception": lambda run: RuntimeError("an error, to try on_exception with"),
}
