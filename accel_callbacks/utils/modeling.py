"""What scripts ask of models without an Accelerator at hand."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_callbacks.modeling.compile import original, uncompile
from accel_callbacks.precision import Precision

__all__ = ["PrecisionType", "extract_model_from_parallel", "is_compiled_module"]


class PrecisionType(str, Enum):
    """The precisions by name; accepted wherever their strings are.

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
    """Whether a module is compiled, by ``torch.compile(module)`` or in place.

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
) -> torch.nn.Module:
    """The model inside of the wrappers of data parallelism and torch.compile.

    Args:
        model: wrapped or not.
        keep_fp32_wrapper: leave the autocast around its forward in place.
        keep_torch_compile: leave it compiled.

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
            return model  # what is compiled is the wrapper
        inner = inner.module
    model = original(inner)
    if not keep_torch_compile:
        uncompile(model)
    if not keep_fp32_wrapper:
        model = Precision(torch.device("cpu")).unwrap(model)
    return model
