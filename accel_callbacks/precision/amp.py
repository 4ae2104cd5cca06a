"""Precisions under torch.autocast, and bf16."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_callbacks.collectives import map_tensors
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.precision import AutocastKwargs
from accel_callbacks.precision.base import Precision, PreparedForward, PreparedMethod
from checkpoint_io.warning import warn

__all__ = ["BF16", "Autocast"]

_FIRST_BF16 = (8, 0)  # Ampere; torch lets older GPUs emulate it


class Autocast(Precision):
    """A precision under ``torch.autocast``; the outputs of the model are cast back to fp32.

    Subclasses set ``name`` and ``dtype``.

    Args:
        device: the device that the model computes on.
        handlers: for their :class:`accel_callbacks.AutocastKwargs`.

    Raises:
        ValueError: the device has no autocast to this type.
    """

    dtype: torch.dtype

    def __init__(self, device: torch.device, handlers: Handlers | None = None) -> None:
        super().__init__(device, handlers)
        self.options = self.handlers.get(AutocastKwargs, AutocastKwargs())
        _check_device(self.name, device, self.dtype)

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Autocast on the device's type."""
        options = options or self.options
        return torch.autocast(
            self.device.type,
            dtype=self.dtype,
            enabled=options.enabled,
            cache_enabled=options.cache_enabled,
        )

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Run ``model.forward`` under autocast and upcast its outputs."""
        self.unwrap(model)
        model.__dict__["forward"] = PreparedForward(model.forward, self)
        return model

    def wrap_methods(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Run these methods under autocast too, and upcast what the outermost call returns."""
        entered: list[bool] = []
        before = [
            name for name, method in vars(model).items() if isinstance(method, PreparedForward)
        ]
        for name in dict.fromkeys([*before, *names]):
            method = getattr(model, name)
            original = method.original if isinstance(method, PreparedForward) else method
            model.__dict__[name] = PreparedMethod(original, self, entered)

    def call(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` under autocast, and upcast its outputs unless that is turned off."""
        with self.autocast():
            output = forward(*args, **kwargs)
        return map_tensors(output, self._upcast) if self.options.upcast_outputs else output

    def _upcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype is self.dtype else tensor


def _check_device(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a device on which torch would fail later, or would silently not autocast."""
    try:
        if not torch.amp.is_autocast_available(device.type):
            raise RuntimeError(f"torch has no autocast for {device.type!r}")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.autocast(device.type, dtype=dtype)
    except (RuntimeError, Warning) as error:
        raise ValueError(
            f"mixed_precision={name!r} does not work on {device}: {error}. Use 'no', or another "
            "precision that the device has."
        ) from error


class BF16(Autocast):
    """Autocast to bfloat16.

    Example:
        >>> import torch
        >>> from accel_callbacks.precision import BF16
        >>> model = BF16(torch.device("cpu")).wrap(torch.nn.Linear(2, 2))
        >>> model(torch.ones(1, 2)).dtype
        torch.float32
    """

    name = "bf16"
    dtype = torch.bfloat16

    def __init__(self, device: torch.device, handlers: Handlers | None = None) -> None:
        super().__init__(device, handlers)
        if device.type == "cuda" and torch.version.hip is None:
            capability = torch.cuda.get_device_capability(device)
            if capability < _FIRST_BF16:
                warn(
                    f"{device} has compute capability {capability[0]}.{capability[1]} and emulates "
                    "bf16, slowly: mixed_precision='fp16' is fast there. bf16 needs 8.0."
                )
