"""The gradients that an optimizer steps with."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["has_gradients", "multiply_gradients"]


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any parameter of this optimizer has a gradient.

    Example:
        >>> import torch
        >>> from accel_callbacks.gradients import has_gradients
        >>> has_gradients(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
        False
    """
    return any(parameter.grad is not None for parameter in _parameters(optimizer))


def multiply_gradients(optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> None:
    """Multiply the gradients that this optimizer steps with, in place.

    Example:
        >>> import torch
        >>> from accel_callbacks.gradients import multiply_gradients
        >>> weight = torch.ones(1, requires_grad=True)
        >>> weight.sum().backward()
        >>> multiply_gradients(torch.optim.SGD([weight]), 0.5)
        >>> weight.grad
        tensor([0.5000])
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in _parameters(optimizer):
        if parameter.grad is not None:
            key = parameter.grad.device, parameter.grad.dtype
            groups.setdefault(key, []).append(parameter.grad)
    for (device, dtype), gradients in groups.items():
        # One cast for all: a factor on the CPU would be a blocking copy for each gradient.
        own = factor.to(device, dtype) if isinstance(factor, torch.Tensor) else factor
        together = [one for one in gradients if _is_plain(one)]
        if together:
            torch._foreach_mul_(together, own)
        for gradient in gradients:
            if not _is_plain(gradient):
                gradient.mul_(own)


def _is_plain(gradient: torch.Tensor) -> bool:
    """Return whether torch's foreach kernels take it; not sparse ones and subclasses (DTensor)."""
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
