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
    gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
    if not gradients:
        return
    if isinstance(factor, torch.Tensor):
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    else:
        torch._foreach_mul_(gradients, factor)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
