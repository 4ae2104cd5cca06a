"""Values as scripts for Accelerate log them: scalars, and objects that a tool takes as they are."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["split", "whole_step"]


def split(values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that each tracker records, and the others, both with names as ``a/b``.

    Tensors and arrays of one element are scalars.
    """
    scalars: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}" if prefix else key
        if isinstance(value, Mapping):
            for parts, found in zip((scalars, objects), split(value, f"{name}/"), strict=True):
                parts.update(found)
        elif isinstance(value, (torch.Tensor, np.ndarray)) and _size(value) == 1:
            scalars[name] = value if value.ndim == 0 else value.reshape(())
        elif value is None or isinstance(value, (str, numbers.Real, np.generic)):
            scalars[name] = value
        else:
            objects[name] = value
    return scalars, objects


def _size(value: torch.Tensor | np.ndarray) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else value.size


def whole_step(step: Any) -> Any:
    """Return a step as the integer that tools record: scripts divide to get theirs."""
    return int(step) if isinstance(step, (float, np.floating, torch.Tensor)) else step
