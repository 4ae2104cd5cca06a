"""What the autocast precisions share: fp32 parameters, low-precision work, fp32 outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_callbacks.collectives import map_tensors
from accel_callbacks.precision.base import Precision, PreparedForward

__all__ = ["Autocast"]


class Autocast(Precision):
    """Run under ``torch.autocast``; the outputs of the model come back in fp32.

    Subclasses set ``name`` and ``dtype``.

    Example:
        >>> from accel_callbacks.precision import BF16
        >>> from accel_callbacks.precision.autocast import Autocast
        >>> issubclass(BF16, Autocast)
        True
    """

    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast on the device's type."""
        return torch.autocast(self.device.type, dtype=self.dtype)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Run ``model.forward`` under autocast and upcast what it returns."""
        self.unwrap(model)
        model.__dict__["forward"] = PreparedForward(model.forward, self)
        return model

    def call(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Forward under autocast, with outputs in fp32."""
        with self.autocast():
            output = forward(*args, **kwargs)
        return map_tensors(output, self._upcast)

    def _upcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype is self.dtype else tensor
