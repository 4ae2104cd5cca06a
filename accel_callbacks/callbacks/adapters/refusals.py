"""Callbacks of Lightning that cannot work without its Trainer, and what to use instead."""

from __future__ import annotations

from typing import Any

from accel_callbacks.integrations.lightning.packages import LightningPackage

__all__ = ["refuse_trainer_bound"]

_REASONS = {
    "BatchSizeFinder": "it drives the Trainer's own loops; use "
    "`accel_callbacks.tuning.find_batch_size` before the run",
    "LearningRateFinder": "it drives the Trainer's own loops; use "
    "`accel_callbacks.tuning.find_learning_rate` before the run",
    "BasePredictionWriter": "it reads the Trainer's prediction loop; write what your loop predicts "
    "where you predict it",
    "StochasticWeightAveraging": "its BatchNorm statistics need another epoch that the Trainer "
    "drives, and would be silently wrong; use "
    "`accel_callbacks.callbacks.WeightAveraging`, and torch.optim.swa_utils.update_bn after it",
}


def refuse_trainer_bound(callback: Any, package: LightningPackage) -> None:
    """Raise TypeError with the reason if a callback, or a parent of it, needs the Trainer."""
    for one in type(callback).__mro__:
        if package.owns(one) and one.__name__ in _REASONS:
            raise TypeError(
                f"{type(callback).__name__} cannot run in a plain loop: {_REASONS[one.__name__]}."
            )
