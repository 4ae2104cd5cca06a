"""Inspect and unwrap models without an Accelerator."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_callbacks.modeling.compile import original, uncompile
from accel_callbacks.precision import Precision

__all__ = ["PrecisionType", "extract_model_from_parallel", "is_compiled_module"]


class PrecisionType(str, Enum):
    """Precisions by name; accepted wherever their strings are.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.utils import PrecisionType
        >>> Accelerator(cpu=True, mixed_precision=PrecisionType.BF16).mixed_precision
        'bf16'
    """

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled, by ``torch.compile(module)`` or in place.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import is_compiled_module
        >>> is_compiled_module(torch.nn.Linear(1, 1))
        False
    """
    return original(module) is not module or module._compiled_call_impl is not None


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """Unwrap a model from data parallelism, and optionally from torch.compile.

    Args:
        model: the model, wrapped or not.
        keep_fp32_wrapper: keep the autocast around its forward.
        keep_torch_compile: keep it compiled.
        recursive: unwrap the modules inside of it too, in place.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import extract_model_from_parallel
        >>> layer = torch.nn.Linear(1, 1)
        >>> extract_model_from_parallel(layer) is layer
        True
    """
    inner: Any = original(model)
    if isinstance(inner, (DistributedDataParallel, DataParallel)):
        if inner is not model and keep_torch_compile:
            return model  # the compiled module is the wrapper
        inner = inner.module
    model = original(inner)
    if not keep_torch_compile:
        uncompile(model)
    if not keep_fp32_wrapper:
        model = Precision(torch.device("cpu")).unwrap(model)
    if recursive:
        _unwrap_inside(model)
    return model


def _unwrap_inside(model: torch.nn.Module) -> None:
    for name, child in list(model.named_children()):
        while isinstance(child, (DistributedDataParallel, DataParallel)):
            child = child.module
            setattr(model, name, child)
        _unwrap_inside(child)
