"""Data parallelism: a replica on each process, gradients averaged in backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_callbacks.strategies.base import Strategy

__all__ = ["DDP"]


class DDP(Strategy):
    """torch's DistributedDataParallel around each model that has something to train.

    Example:
        >>> from accel_callbacks.strategies import DDP
        >>> DDP.has_gradient_sync
        True
    """

    name = "ddp"
    has_gradient_sync = True

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model unless all of it is frozen."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        index = self.topology.device.index
        return DistributedDataParallel(model, device_ids=None if index is None else [index])

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The replica inside the wrapper."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """DDP's own no_sync, for models that it wraps."""
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return super().no_sync(model)
