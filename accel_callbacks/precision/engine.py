"""The precision of an engine that casts models, scales losses and skips steps by itself."""

from __future__ import annotations

from typing import Any

import torch

from accel_callbacks.plugins.base import Handlers
from accel_callbacks.precision.base import Precision

__all__ = ["EnginePrecision"]


class EnginePrecision(Precision):
    """A precision that leaves casting and scaling to the engine, and asks it whether it stepped.

    Args:
        name: ``"no"``, ``"bf16"`` or ``"fp16"``.
        device: the device that the model computes on.
        handlers: options of others.

    Example:
        >>> import torch
        >>> from accel_callbacks.precision.engine import EnginePrecision
        >>> EnginePrecision("fp16", torch.device("cpu")).scales_loss
        False
    """

    def __init__(self, name: str, device: torch.device, handlers: Handlers | None = None) -> None:
        super().__init__(device, handlers)
        self.name = name

    def step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Step the engine; return (True if it stepped, None)."""
        result = optimizer.step(*args, **kwargs)
        return bool(getattr(optimizer, "stepped", True)), result
