"""The collectives of one tensor.

What is only moved travels as bytes, so every type arrives as it is, whatever the backend knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from accel_callbacks.collectives.group import on_backend, world_size

__all__ = ["broadcast_tensor", "dense", "gather_tensor", "reduce_tensor", "sum_of"]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, contiguous and resolved; sparse and nested tensors are refused."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        how = "to_padded_tensor(0)" if tensor.is_nested else "to_dense()"
        raise TypeError(
            f"a tensor of layout {tensor.layout} cannot be sent; convert it with .{how} first."
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = on_backend(tensor).reshape(-1)
    # A single row cut from a matrix counts as contiguous, with the stride of the matrix.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _as_tensor(data: torch.Tensor, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return data.view(like.dtype).reshape(tuple(shape)).to(like.device)


def gather_tensor(tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Concatenate along dimension 0 in rank order; a number becomes an entry for each process.

    Args:
        tensor: alike on all processes but for its first dimension.
        sizes: that dimension on each process; None where it is the same on all.
    """
    local = dense(tensor)
    local = local.unsqueeze(0) if local.dim() == 0 else local
    world = world_size()
    if world == 1:
        return local
    counts = list(sizes) if sizes is not None else [len(local)] * world
    row = local.element_size() * math.prod(local.shape[1:])
    shape = (sum(counts), *local.shape[1:])
    if row == 0 or max(counts) == 0:
        return local.new_empty(shape)
    mine = _as_bytes(local)
    filler = max(counts) * row - len(mine)
    sent = torch.cat([mine, mine.new_zeros(filler)]) if filler else mine
    received = sent.new_empty(world, len(sent))
    dist.all_gather(list(received.unbind(0)), sent)
    parts = [part[: count * row] for part, count in zip(received, counts, strict=True)]
    return _as_tensor(received.reshape(-1) if sizes is None else torch.cat(parts), local, shape)


def broadcast_tensor(tensor: torch.Tensor, source: int) -> torch.Tensor:
    """The tensor of the process ``source``, as a new one."""
    local = dense(tensor)
    if world_size() == 1 or local.numel() == 0:
        return local.clone()
    data = _as_bytes(local).clone()
    dist.broadcast(data, src=source)
    return _as_tensor(data, local, local.shape)


def sum_of(value: float | torch.Tensor) -> torch.Tensor:
    """The sum of a number over all processes, in double precision."""
    total = on_backend(torch.as_tensor(value).detach()).to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total


def reduce_tensor(
    tensor: torch.Tensor,
    reduction: str,
    scale: float,
    weight: float | torch.Tensor | None,
    share: torch.Tensor | None,
) -> torch.Tensor:
    """Combine element by element, in a type that neither rounds nor overflows on the way.

    Args:
        tensor: of the same shape on all processes.
        reduction: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        scale: factor on the result.
        weight: of this process in the mean, None where all count alike.
        share: the sum of all weights, if there are weights.
    """
    local = dense(tensor)
    _check_type(local.dtype, reduction)
    world = world_size()
    value = on_backend(local) if world > 1 else local
    value = value.to(_working_type(value, reduction), copy=True)
    if world > 1:
        if weight is not None and share is not None:
            factor = torch.as_tensor(weight, device=value.device).to(value.real.dtype)
            # An empty share may hold the mean of nothing, which is no number.
            value = torch.where(factor == 0, torch.zeros_like(value), value * factor)
        operation = "sum" if reduction == "mean" else reduction
        dist.all_reduce(value, getattr(dist.ReduceOp, operation.upper()))
        if reduction == "mean":
            value = value / (world if share is None else share.to(value.device, value.real.dtype))
    if scale != 1:
        value = value * scale
    counted = reduction == "sum" or scale != 1
    return value.to(local.device, _result_type(local.dtype, value.dtype, counted))


def _check_type(dtype: torch.dtype, reduction: str) -> None:
    ordered = reduction in ("sum", "mean") or not (dtype.is_complex or dtype is torch.uint64)
    if not ordered:
        raise TypeError(f"{reduction} of {dtype} does not exist; use another type or reduction.")


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _working_type(value: torch.Tensor, reduction: str) -> torch.dtype:
    dtype = value.dtype
    if _is_whole(dtype):
        exact = torch.float32 if value.device.type == "mps" else torch.float64
        return exact if reduction == "mean" else torch.int64
    if dtype.is_complex:
        return torch.complex64 if dtype is torch.complex32 else dtype
    return dtype if dtype is torch.float64 else torch.float32


def _result_type(given: torch.dtype, worked: torch.dtype, counted: bool) -> torch.dtype:
    """As it went in, but means and fractions of whole numbers are floats, and bools are counted."""
    if not _is_whole(given):
        return given
    if not _is_whole(worked):
        return torch.get_default_dtype()
    return torch.int64 if given is torch.bool and counted else given
