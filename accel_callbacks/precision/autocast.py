"""What the autocast precisions share: fp32 parameters, low-precision work, fp32 outputs."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_callbacks.collectives import map_tensors
from accel_callbacks.precision.base import Precision

__all__ = ["Autocast"]

_ORIGINAL = "_accel_callbacks_forward"


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
        if _ORIGINAL in model.__dict__:
            return model
        original = model.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                output = original(*args, **kwargs)
            return map_tensors(output, self._upcast)

        model.__dict__[_ORIGINAL] = original
        model.__dict__["forward"] = forward
        return model

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Give the model its own forward back."""
        if _ORIGINAL in model.__dict__:
            del model.__dict__[_ORIGINAL]
            del model.__dict__["forward"]
        return model

    def _upcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype is self.dtype else tensor
