"""Precisions: one file each, one line here."""

from __future__ import annotations

import torch

from accel_callbacks.precision.base import Precision
from accel_callbacks.precision.bf16 import BF16
from accel_callbacks.precision.fp16 import FP16

__all__ = ["BF16", "FP16", "Precision", "create_precision"]

_REGISTRY: dict[str, type[Precision]] = {"no": Precision, "bf16": BF16, "fp16": FP16}


def create_precision(name: str, device: torch.device) -> Precision:
    """The precision of this name on this device.

    Example:
        >>> import torch
        >>> from accel_callbacks.precision import create_precision
        >>> create_precision("bf16", torch.device("cpu")).name
        'bf16'
    """
    return _REGISTRY[name](device)
