"""The interface of a precision; as it stands it is full fp32 and does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["Precision"]


class Precision:
    """How the forward pass, the loss and the optimizer step are computed.

    Args:
        device: the device that the model computes on.

    Example:
        >>> import torch
        >>> from accel_callbacks.precision import Precision
        >>> with Precision(torch.device("cpu")).autocast():
        ...     (torch.ones(2) * 2).dtype
        torch.float32
    """

    name = "no"
    scales_loss = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def autocast(self) -> AbstractContextManager[Any]:
        """Context in which operations run in this precision."""
        return nullcontext()

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make the model's own forward run in this precision; parameters stay fp32."""
        return model

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Undo :meth:`wrap`."""
        return model

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients of this optimizer to their true size, once a step."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        """Step; returns whether it happened, and what the optimizer returned."""
        return True, optimizer.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
