"""Inspect and unwrap models without an Accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_callbacks.compat.constants import BaseEnum
from accel_callbacks.models.compile import original, uncompile
from accel_callbacks.precision import Precision

__all__ = [
    "PrecisionType",
    "extract_model_from_parallel",
    "has_original",
    "is_compiled_module",
    "recompile",
]

_PARALLEL = (DistributedDataParallel, DataParallel)


class PrecisionType(str, BaseEnum):
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


def has_original(module: Any) -> bool:
    """Return whether a module has an ``_orig_mod``, as what ``torch.compile(module)`` returns.

    By this name of Accelerate's, ``is_compiled_module``, scripts decide to read that attribute,
    which a model that is compiled in place does not have.
    """
    return isinstance(module, torch.nn.Module) and original(module) is not module


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """Unwrap a model from data parallelism, and optionally from torch.compile.

    Args:
        model: the model, wrapped or not.
        keep_fp32_wrapper: keep the autocast around its forward; if ``False``, the forward is again
            the one before, or the one that a script has kept as ``model._original_forward``.
        keep_torch_compile: keep it compiled: what ``torch.compile`` returned around it is returned,
            or one with the same options if data parallelism was in between.
        recursive: unwrap the modules inside of it too, in place.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import extract_model_from_parallel
        >>> layer = torch.nn.Linear(1, 1)
        >>> extract_model_from_parallel(layer) is layer
        True
    """
    inner: Any = model
    compiled: Any = None
    while True:
        if (module := original(inner)) is not inner:
            compiled, inner = inner, module
        elif isinstance(inner, _PARALLEL):
            inner = inner.module
        else:
            break
    if not keep_torch_compile:
        uncompile(inner)
    if not keep_fp32_wrapper:
        inner = Precision(torch.device("cpu")).unwrap(inner)
        _restore_forward(inner)
    if recursive:
        _unwrap_inside(inner)
    keeps = compiled is not None and keep_torch_compile
    unwrapped: torch.nn.Module = recompile(compiled, inner) if keeps else inner
    return unwrapped


def recompile(model: Any, inner: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of a model, compiled as ``torch.compile`` has compiled the model.

    Args:
        model: what ``torch.compile`` returned; otherwise the module is returned as it is.
        inner: the module.
    """
    if (around := original(model)) is model:
        return inner
    compiled: torch.nn.Module = model if around is inner else model.dynamo_ctx(inner)
    return compiled


def _restore_forward(model: torch.nn.Module) -> None:
    """Restore the forward that a script has kept before it wrapped it."""
    forward = vars(model).pop("_original_forward", None)
    if forward is None:
        return
    vars(model).pop("forward", None)
    if model.forward != forward:  # it was not that of the class
        vars(model)["forward"] = forward


def _unwrap_inside(model: torch.nn.Module) -> None:
    for name, child in list(model.named_children()):
        while isinstance(child, _PARALLEL):
            child = child.module
            setattr(model, name, child)
        _unwrap_inside(child)
