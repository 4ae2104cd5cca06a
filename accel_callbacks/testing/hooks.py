"""Which hook would be called when, and whose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accel_callbacks.callbacks.dispatch import Dispatcher
from accel_callbacks.testing.training import TinyTraining

__all__ = ["simulate"]

_INSIDE_EPOCH = ("train_batch", "validation", "log", "test")
_INSIDE_BATCH = ("before_", "after_")


def simulate(
    callbacks: Iterable[Any] = (),
    epochs: int = 2,
    batches: int = 3,
    evaluate_every: int = 1,
    *,
    window: int = 1,
) -> str:
    """The sequence of hooks of a run, and which of these callbacks each would call, as text.

    No callback is called, and no model is needed: the order is that of a small real training
    with ``run.epochs``, ``accumulate`` and ``evaluate``, without checkpoints.

    Args:
        callbacks: as for the Accelerator.
        epochs: of the run.
        batches: of an epoch.
        evaluate_every: evaluate after every so many epochs; never if 0.
        window: micro-batches of an optimizer step.

    Returns:
        A line for each hook: its number of the epoch, batch or step, then the callbacks that have
        it, in the order of their calls.

    Raises:
        ValueError: a number is below 1 (``evaluate_every``: below 0).
        TypeError: something is no callback.

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
    least = {"epochs": 1, "batches": 1, "evaluate_every": 0, "window": 1}
    given = {"epochs": epochs, "batches": batches, "evaluate_every": evaluate_every}
    for name, value in {**given, "window": window}.items():
        if value < least[name]:
            raise ValueError(f"{name}={value} must be at least {least[name]}.")
    called = _called(Dispatcher(callbacks))
    training = _Simulated(evaluate_every, epochs=epochs, batches=batches, window=window)
    lines = [(_indent(line) + line, called.get(line.split()[0], "")) for line in training.trace]
    return "\n".join(f"{line:26}  {names}".rstrip() for line, names in lines)


class _Simulated(TinyTraining):
    """A training that evaluates after some of its epochs."""

    def __init__(self, evaluate_every: int, **options: Any) -> None:
        super().__init__(evaluate=False, **options)
        self._every = evaluate_every
        self.play()

    def _train_epoch(self) -> None:
        super()._train_epoch()
        self.evaluate = self._every > 0 and (self.run.current_epoch + 1) % self._every == 0


def _called(dispatch: Dispatcher) -> dict[str, str]:
    """For each hook, without its ``on_``, the names of those that it calls."""
    owners = {call: entry.name for entry in dispatch.entries for call in entry.calls.values()}
    return {
        hook.removeprefix("on_"): ", ".join(owners[call] for call in calls)
        for hook, calls in dispatch.hooks.items()
    }


def _indent(line: str) -> str:
    """By how deep in the loop a hook fires."""
    if line.startswith("train_epoch"):
        return "  "
    if line.startswith(_INSIDE_BATCH):
        return "      "
    return "    " if line.startswith(_INSIDE_EPOCH) else ""
