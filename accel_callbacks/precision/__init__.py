"""Precisions, one per file; a new one is added to the registry here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from accel_callbacks._lazy import lazy_names
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.precision import AORecipeKwargs
from accel_callbacks.precision.base import Precision

if TYPE_CHECKING:
    from accel_callbacks.precision.amp import BF16 as BF16
    from accel_callbacks.precision.engine import EnginePrecision as EnginePrecision
    from accel_callbacks.precision.fp8 import FP8 as FP8
    from accel_callbacks.precision.fp16 import FP16 as FP16

__all__ = ["BF16", "FP8", "FP16", "EnginePrecision", "Precision", "create_precision"]

# A run has one precision.
_HOME = {"BF16": "amp", "FP16": "fp16", "FP8": "fp8", "EnginePrecision": "engine"}
__getattr__, __dir__ = lazy_names(__name__, _HOME)

_REGISTRY = {"no": "Precision", "bf16": "BF16", "fp16": "FP16", "fp8": "FP8"}


def create_precision(
    name: str,
    device: torch.device,
    handlers: Handlers | None = None,
    *,
    engine: bool = False,
) -> Precision:
    """Return the precision of this name for a device.

    Args:
        name: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``.
        device: the device that the model computes on.
        handlers: its options; the defaults if ``None``.
        engine: an engine brings the precision about, and scales losses itself.

    Raises:
        ValueError: the device does not support it, or there is an fp8 recipe without fp8.
        ImportError: fp8 without torchao.

    Example:
        >>> import torch
        >>> from accel_callbacks.precision import create_precision
        >>> create_precision("bf16", torch.device("cpu")).name
        'bf16'
    """
    handlers = handlers or Handlers()
    if name != "fp8" and handlers.get(AORecipeKwargs) is not None:
        raise ValueError(f"AORecipeKwargs needs mixed_precision='fp8', and it is {name!r}.")
    if engine and name != "fp8":
        from accel_callbacks.precision.engine import EnginePrecision

        return EnginePrecision(name, device, handlers)
    kind: type[Precision] = getattr(sys.modules[__name__], _REGISTRY[name])
    return kind(device, handlers)
