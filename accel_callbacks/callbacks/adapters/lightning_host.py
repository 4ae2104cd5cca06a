"""``pl.Trainer`` as a host of our callbacks."""

from __future__ import annotations

from typing import Any

import torch

from accel_callbacks.callbacks.adapters.host import Host

__all__ = ["FreshMetrics", "LightningHost"]

#: Public attributes of the Trainer that mean the same in ``TrainingRun``.
_SAME = frozenset(
    (
        "accumulate_grad_batches",
        "callbacks",
        "checkpoint_callback",
        "checkpoint_callbacks",
        "ckpt_path",
        "current_epoch",
        "default_root_dir",
        "early_stopping_callback",
        "early_stopping_callbacks",
        "estimated_stepping_batches",
        "evaluating",
        "global_step",
        "is_last_batch",
        "local_rank",
        "log_dir",
        "max_steps",
        "node_rank",
        "num_devices",
        "num_nodes",
        "num_test_batches",
        "num_training_batches",
        "num_val_batches",
        "precision",
        "predicting",
        "test_dataloaders",
        "testing",
        "train_dataloader",
        "training",
        "val_dataloaders",
        "validating",
    )
)


class LightningHost(Host):
    """The Trainer by which the adapter was called last.

    Example:
        >>> from accel_callbacks.callbacks.adapters.lightning_host import LightningHost
        >>> LightningHost().title
        'pl.Trainer'
    """

    title = "pl.Trainer"

    def __init__(self) -> None:
        self.trainer: Any = None

    def get(self, name: str) -> Any:
        """From the Trainer's public attributes."""
        if name in _SAME:
            return getattr(self.trainer, name)
        if name == "resumed_from":
            return self.trainer.ckpt_path
        if name == "first_epoch":
            return 0
        if name == "max_epochs":  # -1 is no limit
            return None if self.trainer.max_epochs == -1 else self.trainer.max_epochs
        raise KeyError(name)

    def models(self) -> list[torch.nn.Module]:
        """The LightningModule."""
        return [self.trainer.lightning_module]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of ``configure_optimizers``."""
        return list(self.trainer.optimizers)

    def schedulers(self) -> list[Any]:
        """Likewise."""
        return [config.scheduler for config in self.trainer.lr_scheduler_configs]

    def metrics(self) -> dict[str, Any]:
        """``trainer.callback_metrics``."""
        found: dict[str, Any] = self.trainer.callback_metrics
        return found

    def device(self) -> torch.device:
        """The strategy's."""
        return torch.device(self.trainer.strategy.root_device)

    def log(self, values: dict[str, Any], step: int) -> None:
        """To all of the Trainer's loggers; numbers are read from the device here."""
        numbers = {name: float(one) for name, one in values.items() if not isinstance(one, str)}
        for logger in self.trainer.loggers:
            logger.log_metrics(numbers, step=step)

    def stop(self, reason: str) -> None:
        """``trainer.should_stop``, of which the Trainer does not tell its other processes."""
        self.trainer.should_stop = True

    def accumulate(self, batches: int) -> None:
        """``trainer.accumulate_grad_batches``."""
        self.trainer.accumulate_grad_batches = batches


class FreshMetrics:
    """Which of the Trainer's metrics are new: Lightning does not tell when one is logged.

    A value that was logged again is another tensor, with memory of its own.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.adapters.lightning_host import FreshMetrics
        >>> fresh, metrics = FreshMetrics(), {"loss": torch.tensor(1.0)}
        >>> list(fresh.among(metrics)), list(fresh.among(metrics))
        (['loss'], [])
    """

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def among(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Those that are new since the last look."""
        fresh = {
            name: value for name, value in metrics.items() if not _same(value, self._seen.get(name))
        }
        self._seen = dict(metrics)
        return fresh

    def note(self, values: dict[str, Any]) -> None:
        """These are no news."""
        self._seen.update(values)


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return now.data_ptr() == before.data_ptr()
    return now is before
