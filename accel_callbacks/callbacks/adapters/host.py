"""What another library's trainer must tell, and do, so that our callbacks run inside of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

__all__ = ["Host"]


class Host(ABC):
    """One trainer, as :class:`RunView` asks it; a subclass for each library.

    Example:
        >>> from accel_callbacks.callbacks.adapters.host import Host
        >>> "stop" in Host.__abstractmethods__
        True
    """

    #: What an error calls the trainer.
    title: str
    #: Whether the trainer can be asked to save.
    can_save = False

    @abstractmethod
    def get(self, name: str) -> Any:
        """An attribute of ``TrainingRun`` that tells where it stands; KeyError for others.

        At least global_step, current_epoch, max_epochs, num_training_batches, num_val_batches,
        num_test_batches, is_last_batch, resumed_from, precision and accumulate_grad_batches.
        """

    @abstractmethod
    def models(self) -> list[torch.nn.Module]:
        """The models that are trained, as the user built them."""

    @abstractmethod
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, without wrappers."""

    @abstractmethod
    def schedulers(self) -> list[Any]:
        """The schedulers of the learning rate."""

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """The last values by name; what is set in it stays."""

    @abstractmethod
    def device(self) -> torch.device:
        """Where this process computes."""

    @abstractmethod
    def log(self, values: dict[str, Any], step: int) -> None:
        """To the trackers that the trainer has."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Ask the trainer to stop; called on all processes."""

    def save_now(self, reason: str) -> None:
        """Ask the trainer to save, where it ``can_save``; called on all processes."""
        raise NotImplementedError(f"{self.title} cannot be asked to save")

    @abstractmethod
    def accumulate(self, batches: int) -> None:
        """Set the micro-batches of a step."""
