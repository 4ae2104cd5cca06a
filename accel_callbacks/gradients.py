"""The gradients that an optimizer steps with: their norm, and changes of all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

__all__ = [
    "clip_norm",
    "clip_value",
    "combined_norm",
    "first_elements",
    "has_gradients",
    "local_part",
    "multiply_gradients",
    "parameters_of",
    "total_norm",
]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory.

    Example:
        >>> import torch
        >>> from accel_callbacks.gradients import local_part
        >>> local_part(torch.ones(1))
        tensor([1.])
    """
    if not hasattr(tensor, "device_mesh"):  # a DTensor, without importing torch's module of it
        return tensor
    part: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def first_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first elements of this rank's part, to see whether a tensor changes."""
    return local_part(tensor).detach().flatten()[:64].clone()


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Yield the parameters that optimizers hold, frozen ones included."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return (parameter for group in groups for parameter in group["params"])


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any parameter of this optimizer has a gradient.

    Example:
        >>> import torch
        >>> from accel_callbacks.gradients import has_gradients
        >>> has_gradients(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
        False
    """
    return any(parameter.grad is not None for parameter in parameters_of([optimizer]))


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
    multiply = getattr(optimizer, "multiply_gradients", None)  # of an engine with its own gradients
    if multiply is not None:
        multiply(factor)
    else:
        scale_gradients(parameters_of([optimizer]), factor)


def total_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the total norm of the gradients, as a tensor on their device; 0 without any.

    For sharded gradients it is the norm over all ranks, and all ranks must call it.

    Args:
        parameters: those without a gradient are ignored.
        norm_type: the ``p`` of the norm.

    Example:
        >>> import torch
        >>> from accel_callbacks.gradients import total_norm
        >>> weight = torch.ones(2, requires_grad=True)
        >>> (weight * torch.tensor([3.0, 4.0])).sum().backward()
        >>> total_norm([weight])
        tensor(5.)
    """
    by_sharding: dict[Any, list[torch.Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None and p.grad.numel()):
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        sharding = (getattr(dense, "device_mesh", None), getattr(dense, "placements", ()))
        by_sharding.setdefault(sharding, []).append(dense.detach())
    if not by_sharding:
        return torch.tensor(0.0, device="cpu")
    norms = [_norm(same, norm_type, *sharding) for sharding, same in by_sharding.items()]
    return combined_norm(norms, norm_type)


def combined_norm(norms: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the total norm from the norms of parts.

    Example:
        >>> import torch
        >>> from accel_callbacks.gradients import combined_norm
        >>> combined_norm([torch.tensor(3.0), torch.tensor(4.0)])
        tensor(5.)
    """
    if len(norms) == 1:
        return norms[0]
    parts = torch.stack([norm.to(norms[0].device).float() for norm in norms])
    total: torch.Tensor = torch.linalg.vector_norm(parts, norm_type)
    return total


def _norm(
    gradients: Sequence[torch.Tensor], norm_type: float, mesh: Any, placements: Sequence[Any]
) -> torch.Tensor:
    """Return the norm of gradients with the same sharding."""
    if mesh is None:
        return torch.nn.utils.get_total_norm(gradients, norm_type)
    if any(placement.is_partial() for placement in placements):
        gradients = [gradient.full_tensor() for gradient in gradients]  # type: ignore[attr-defined]
        return torch.nn.utils.get_total_norm(gradients, norm_type)
    # A rank may hold no element of some tensors, of which the infinity norm is not defined.
    parts = [part for part in map(local_part, gradients) if part.numel()]
    first = local_part(gradients[0])
    norm = (
        torch.nn.utils.get_total_norm(parts, norm_type)
        if parts
        else torch.zeros((), dtype=first.dtype, device=first.device)
    )
    return _reduce_norm(norm, norm_type, mesh, placements)


def _reduce_norm(
    norm: torch.Tensor, norm_type: float, mesh: Any, placements: Sequence[Any]
) -> torch.Tensor:
    """Return the norm over all shards, from that of each rank's."""
    # Imported here, because most runs have no shards.
    import torch.distributed as dist

    largest = norm_type == float("inf")
    # Offloaded gradients are on the host, where the mesh may have no backend.
    total = norm.to(mesh.device_type).double()  # in which no power overflows
    if not largest:
        total = total.pow(norm_type)
    for number, placement in enumerate(placements):
        if not placement.is_replicate():  # also for FSDP after tensor parallelism, "strided"
            operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(total, op=operation, group=mesh.get_group(number))
    if not largest:
        total = total.pow(1.0 / norm_type)
    return total.to(norm.device, torch.promote_types(norm.dtype, torch.float32))


def clip_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip by the total norm over all ranks, and return that; gradients may be sharded anyhow.

    Example:
        >>> import torch
        >>> from accel_callbacks.gradients import clip_norm
        >>> weight = torch.ones(1, requires_grad=True)
        >>> (weight * 4).sum().backward()
        >>> clip_norm([weight], 2.0), weight.grad
        (tensor(4.), tensor([2.0000]))
    """
    parameters = list(parameters)
    norm = total_norm(parameters, norm_type)
    scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


@torch.no_grad()
def clip_value(parameters: Iterable[torch.Tensor], value: float) -> None:
    """Clip each element to ``[-value, value]``; gradients may be sharded anyhow.

    Example:
        >>> import torch
        >>> from accel_callbacks.gradients import clip_value
        >>> weight = torch.ones(1, requires_grad=True)
        >>> (weight * 4).sum().backward()
        >>> clip_value([weight], 0.5)
        >>> weight.grad
        tensor([0.5000])
    """
    for parameter in parameters:
        if parameter.grad is not None:
            local_part(parameter.grad).clamp_(-value, value)


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply the gradients of parameters in place; they may be sharded anyhow.

    Example:
        >>> import torch
        >>> from accel_callbacks.gradients import scale_gradients
        >>> weight = torch.ones(1, requires_grad=True)
        >>> weight.sum().backward()
        >>> scale_gradients([weight], 0.5)
        >>> weight.grad
        tensor([0.5000])
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            # Elementwise, so that each rank can do its own part.
            part = local_part(parameter.grad)
            groups.setdefault((part.device, part.dtype), []).append(part)
    for (device, dtype), gradients in groups.items():
        # One cast for all: a factor on the CPU would be a blocking copy for each gradient.
        scale = factor.to(device, dtype) if isinstance(factor, torch.Tensor) else factor
        plain = [gradient for gradient in gradients if _is_plain(gradient)]
        if plain:
            torch._foreach_mul_(plain, scale)
        for gradient in gradients:
            if not _is_plain(gradient):
                gradient.mul_(scale)


def _is_plain(gradient: torch.Tensor) -> bool:
    """Return whether torch's foreach kernels take it; not sparse ones and subclasses."""
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided
