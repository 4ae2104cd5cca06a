"""Collectives over nested structures of tensors, and over plain objects.

Every function works on one process too, where it changes nothing but the container.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection

__all__ = [
    "broadcast",
    "broadcast_object",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
]

T = TypeVar("T")
_REDUCTIONS = ("sum", "mean", "max", "min")


def world_size() -> int:
    """Number of processes in the default group, 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Index of this process in the default group, 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    """Wait until every process is here."""
    if world_size() > 1:
        dist.barrier()


def map_tensors(data: T, fn: Callable[[torch.Tensor], Any]) -> T:
    """Apply ``fn`` to each tensor of a nested structure, keeping the structure."""
    if isinstance(data, torch.Tensor):
        return cast(T, fn(data))
    return cast(T, apply_to_collection(data, torch.Tensor, fn))


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure, in the order in which :func:`map_tensors` meets them."""
    found: list[torch.Tensor] = []
    map_tensors(data, found.append)
    return found


def gather(data: T) -> T:
    """Concatenate each tensor of ``data`` over all processes, along dimension 0, in rank order.

    Args:
        data: a tensor or a nested structure (list, tuple, named tuple, dict, dataclass) of
            tensors of shape ``(n, ...)``, the same structure on all processes; ``n`` may differ
            between them. Zero-dimensional tensors give one entry for each process.

    Returns:
        The same structure with tensors of shape ``(sum of all n, ...)``.

    Raises:
        ValueError: on all processes, where they hold another number of tensors, or tensors that
            differ in more than their first dimension.

    Example:
        >>> import torch
        >>> from accel_callbacks import gather
        >>> gather({"loss": torch.tensor(2.0)})
        {'loss': tensor([2.])}
    """
    return gather_sized(data, sizes_on_all(data))


def gather_sized(data: T, sizes: list[list[int]] | None) -> T:
    """:func:`gather`, where :func:`sizes_on_all` was asked already."""
    if sizes is None:
        return map_tensors(data, _gather_tensor)
    each = iter(zip(*sizes, strict=True))
    return map_tensors(data, lambda tensor: _gather_uneven(tensor, next(each)))


def sizes_on_all(data: Any) -> list[list[int]] | None:
    """Collective: for each process the first dimension of each tensor, None if they are alike.

    torch gathers what differs into garbage, so the processes compare what they hold beforehand.

    Raises:
        ValueError: see :func:`gather`.
    """
    if world_size() == 1:
        return None
    own = [(str(t.dtype), tuple(t.shape) or (1,)) for t in tensors_in(data)]
    mark = torch.tensor([zlib.crc32(repr(own).encode())])
    if len(set(_gather_tensor(on_backend(mark)).tolist())) == 1:
        return None
    layouts = gather_object(own)
    kinds = [[(dtype, shape[1:]) for dtype, shape in layout] for layout in layouts]
    if any(kind != kinds[0] for kind in kinds):
        held = "; ".join(f"process {index}: {layout}" for index, layout in enumerate(layouts))
        raise ValueError(
            f"these tensors cannot be gathered, only their first dimension may differ: {held}"
        )
    return [[shape[0] for _, shape in layout] for layout in layouts]


def on_backend(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor where the group's backend takes it (a user's own group may be NCCL alone)."""
    return tensor.cuda() if dist.get_backend() == "nccl" else tensor


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.unsqueeze(0) if tensor.dim() == 0 else tensor).contiguous()


def _gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    local = _at_least_1d(tensor)
    world = world_size()
    if world == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(parts, local)
    return torch.cat(parts)


def _gather_uneven(tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Gather pieces of these sizes, filled up to the largest on the way."""
    local = _at_least_1d(tensor)
    filler = local.new_zeros(max(sizes) - len(local), *local.shape[1:])
    parts = _gather_tensor(torch.cat([local, filler])).chunk(world_size())
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce(
    data: T, reduction: str = "mean", scale: float = 1.0, *, weight: float | torch.Tensor = 1.0
) -> T:
    """Combine each tensor of ``data`` over all processes, element by element.

    Args:
        data: a tensor or a nested structure of tensors of the same shape on all processes.
        reduction: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``. Integers stay integers, exactly,
            but their mean is of torch's default floating-point type.
        scale: factor on the result; a float other than 1 makes floats of integers.
        weight: with ``"mean"``, how much this process counts, for example its number of
            samples, so that unequal shares give the true mean.

    Raises:
        ValueError: an unknown reduction, or a weight with another reduction than the mean.

    Example:
        >>> import torch
        >>> from accel_callbacks import reduce
        >>> reduce(torch.tensor([1.0, 3.0]), reduction="sum", scale=2.0)
        tensor([2., 6.])
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; use one of {_REDUCTIONS}.")
    weighted = isinstance(weight, torch.Tensor) or weight != 1.0
    if weighted and reduction != "mean":
        raise ValueError('weight= belongs to reduction="mean"; leave it out otherwise.')

    def combine(tensor: torch.Tensor) -> torch.Tensor:
        result = _reduce_tensor(tensor, reduction, weight)
        return result if scale == 1 else result * scale  # a product makes floats of integers

    return map_tensors(data, combine)


def _reduce_tensor(
    tensor: torch.Tensor, reduction: str, weight: float | torch.Tensor
) -> torch.Tensor:
    result = tensor.detach().clone().contiguous()
    if reduction == "mean" and not (result.is_floating_point() or result.is_complex()):
        result = result.to(torch.get_default_dtype())
    if world_size() == 1:
        return result
    if reduction != "mean":
        dist.all_reduce(result, getattr(dist.ReduceOp, reduction.upper()))
        return result
    share = torch.as_tensor(weight, dtype=torch.float64).to(result.device)
    dist.all_reduce(share)
    result = result * weight
    dist.all_reduce(result)
    return result / share.to(result.dtype)


def broadcast(data: T, from_process: int = 0) -> T:
    """Give every process the tensors that ``from_process`` holds.

    Example:
        >>> import torch
        >>> from accel_callbacks import broadcast
        >>> broadcast([torch.tensor([1, 2])])
        [tensor([1, 2])]
    """

    def send(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.detach().clone().contiguous()
        if world_size() > 1:
            dist.broadcast(result, src=from_process)
        return result

    return map_tensors(data, send)


def pad_across_processes(data: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> T:
    """Pad each tensor along ``dim`` to the largest size that any process has there.

    Args:
        data: a tensor or nested structure; tensors may differ between processes along ``dim``.
        dim: the dimension to pad; tensors that lack it stay as they are.
        pad_index: the value to fill with.
        pad_first: put the padding in front instead of behind.

    Example:
        >>> import torch
        >>> from accel_callbacks import pad_across_processes
        >>> pad_across_processes(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    return map_tensors(data, lambda tensor: _pad_tensor(tensor, dim, pad_index, pad_first))


def _pad_tensor(tensor: torch.Tensor, dim: int, value: float, first: bool) -> torch.Tensor:
    if not -tensor.dim() <= dim < tensor.dim():
        return tensor
    sizes = _gather_tensor(torch.tensor(tensor.shape[dim], device=tensor.device))
    largest = int(sizes.max())
    missing = largest - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filler = tensor.new_full(shape, value)
    return torch.cat([filler, tensor] if first else [tensor, filler], dim=dim)


def gather_object(value: T) -> list[T]:
    """One list with what each process passed, in rank order. Objects must be picklable.

    Example:
        >>> from accel_callbacks import gather_object
        >>> gather_object({"rank": 0})
        [{'rank': 0}]
    """
    if world_size() == 1:
        return [value]
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, value)
    return parts


def broadcast_object(value: T, from_process: int = 0) -> T:
    """The object that ``from_process`` passed, on every process.

    Example:
        >>> from accel_callbacks import broadcast_object
        >>> broadcast_object("run-7")
        'run-7'
    """
    if world_size() == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=from_process)
    return cast(T, box[0])


def any_process(flag: bool) -> bool:
    """True on every process if it is true on one."""
    if world_size() == 1:
        return flag
    votes = on_backend(torch.tensor([int(flag)], dtype=torch.int32))
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes.item())
