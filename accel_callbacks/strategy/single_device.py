"""One process, one device."""

from __future__ import annotations

import torch

from accel_callbacks.strategy.base import Strategy

__all__ = ["SingleDevice"]


class SingleDevice(Strategy):
    """A strategy for one device, which leaves the model unchanged.

    Example:
        >>> import torch
        >>> from accel_callbacks import Topology
        >>> from accel_callbacks.strategy import SingleDevice
        >>> model = torch.nn.Linear(2, 2)
        >>> SingleDevice(Topology(torch.device("cpu"))).wrap(model) is model
        True
    """

    name = "single"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model itself."""
        return model
