"""The run's optimizers, schedulers and callbacks, without what this library put around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_callbacks.integrations.lightning.packages import LightningPackage

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["bare", "bare_optimizers", "lightning_callbacks", "scheduler_configs"]


class _SchedulerView:
    """A scheduler whose optimizer is the user's own, as Lightning's callbacks compare them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def optimizer(self) -> Any:
        return bare(self._scheduler.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_scheduler":
            raise AttributeError(name)
        return getattr(self._scheduler, name)


def bare(optimizer: Any) -> Any:
    """The user's optimizer inside of a prepared one.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks.adapters.wrapped_parts import bare
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> bare(Accelerator(cpu=True).prepare(sgd)) is sgd
        True
    """
    from accel_callbacks.optimizer import AcceleratedOptimizer

    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def bare_optimizers(run: TrainingRun) -> list[Any]:
    """The user's optimizers, in the order of ``prepare``."""
    return [bare(optimizer) for optimizer in run.accelerator.optimizers]


def scheduler_configs(package: LightningPackage, run: TrainingRun) -> list[Any]:
    """Lightning's record of each prepared scheduler; they move with optimizer steps."""
    record = package.get("utilities.types", "LRSchedulerConfig")
    return [
        record(scheduler=_SchedulerView(prepared.scheduler), interval="step")
        for prepared in run.accelerator.schedulers
    ]


def lightning_callbacks(run: TrainingRun) -> list[Any]:
    """The run's callbacks; those of Lightning as the user gave them."""
    return [getattr(one, "lightning_callback", one) for one in run.accelerator.callbacks]
