"""Gather, pad, reduce and broadcast nested structures of tensors.

Tensors that are only moved are sent as bytes, so that every dtype arrives unchanged even if the
backend does not support it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accel_callbacks.collectives.group import (
    explained,
    group_for,
    on_backend,
    source_of,
    world_size,
)
from accel_callbacks.collectives.nested import (
    is_number,
    leaves,
    map_leaves,
    map_values,
    refuse_others,
    values_in,
)
from accel_callbacks.collectives.objects import (
    Call,
    begin,
    contents,
    differences,
    exchange,
    send_object,
    whole,
)
from accel_callbacks.collectives.sharded import full_tensor, is_sharded
from accel_callbacks.errors import nearest
from checkpoint_io.warning import warn

__all__ = [
    "NestedTensorWarning",
    "broadcast",
    "broadcast_tensor",
    "compare",
    "dense",
    "gather",
    "gather_sized",
    "gather_tensor",
    "numbers_to_tensors",
    "pad_across_processes",
    "reduce",
    "reduce_tensor",
    "rows_held",
    "rows_of",
    "sizes_on_all",
    "sum_of",
]

T = TypeVar("T")

_REDUCTIONS = ("sum", "mean", "max", "min", "none")


class NestedTensorWarning(UserWarning):
    """A nested tensor was not padded."""


def gather(tensor: T, *, debug: bool | None = None) -> T:
    """Concatenate each tensor over all processes, along dimension 0, in rank order.

    Processes that share a model, and have read the same batch, are not told apart:
    ``Accelerator.gather_for_metrics`` does.

    Args:
        tensor: a tensor or a nested structure (list, tuple, named tuple, mapping of any class,
            dataclass) of tensors of shape ``(n, ...)`` and any dtype, the same structure on all
            processes; ``n`` may differ between them. Tensors without dimensions and Python's
            numbers give one entry for each process. A DTensor, which is sharded over the
            processes, gives the whole tensor. numpy arrays are combined as tensors are, and come
            back as arrays. None stays None.
        debug: first compare what the processes hold; read from ``ACCEL_DEBUG`` if ``None``.

    Returns:
        The same structure with detached tensors of shape ``(sum of all n, ...)``.

    Raises:
        ValueError: on all processes, if their structures differ, or their tensors differ in more
            than the first dimension.
        TypeError: a sparse tensor; or a string, a set or another object, on one process too: see
            :func:`gather_object`.
        DistributedOperationException: in debug mode, if the calls of the processes differ.

    Example:
        >>> import torch
        >>> from accel_callbacks import gather
        >>> gather({"loss": torch.tensor(2.0), "n": 3})
        {'loss': tensor([2.]), 'n': tensor([3])}
    """
    begin("gather", debug, lambda: rows_held(tensor))
    sizes = sizes_on_all(tensor)
    # After the collective that compares structures, so that all ranks raise.
    refuse_others("gather", tensor, "gather_object")
    return numbers_to_tensors(gather_sized(tensor, sizes))


def gather_sized(data: T, sizes: list[list[int]] | None) -> T:
    """Gather tensors and arrays as :func:`gather` does, with the sizes of :func:`sizes_on_all`."""
    if sizes is None:
        return map_values(data, gather_tensor)
    each = iter(zip(*sizes, strict=True))
    return map_values(data, lambda tensor: gather_tensor(tensor, next(each)))


def numbers_to_tensors(data: T, ranks: Sequence[int] | None = None) -> T:
    """Collective: replace each of Python's numbers by a tensor with an entry for each rank.

    Args:
        data: a nested structure.
        ranks: those that get an entry; all if None.
    """

    def columns(numbers: list[Any]) -> Iterable[torch.Tensor]:
        held = exchange(numbers)
        if ranks is not None:
            held = [held[rank] for rank in ranks]
        return map(_tensor_of_numbers, zip(*held, strict=True))

    return _replace_numbers(data, columns)


def _replace_numbers(data: T, replace: Callable[[list[Any]], Iterable[Any]]) -> T:
    """Replace Python's numbers by what a function returns for all of them; without any, call none.

    The ranks have numbers in the same places, so that all or none of them call the function, and it
    may be a collective.
    """
    numbers = [leaf.value for leaf in leaves(data, is_number, by_key=True)]
    if not numbers:
        return data
    replaced = iter(replace(numbers))
    return map_leaves(data, lambda _: next(replaced), is_number, by_key=True)


def _tensor_of_numbers(numbers: tuple[Any, ...]) -> torch.Tensor:
    exact = torch.float64 if any(isinstance(number, float) for number in numbers) else None
    complexes = any(isinstance(number, complex) for number in numbers)
    return torch.tensor(numbers, dtype=torch.complex128 if complexes else exact, device="cpu")


def sizes_on_all(data: Any) -> list[list[int]] | None:
    """Collective: return the first dimension of each tensor for each rank, None if all are equal.

    Raises:
        ValueError: see :func:`gather`.
    """
    return None if world_size() == 1 else compare("gather", rows_held(data), rows_of(data))


def rows_held(data: Any, path: str = "") -> list[str]:
    """Return what must be equal on all ranks to gather: all but the first dimension of tensors."""
    return contents(data, lambda tensor: whole(tensor, ("*", *tensor.shape[1:])), path)


def rows_of(data: Any) -> list[int]:
    """Return the first dimension of each tensor, 1 for those without one."""
    return [tensor.shape[0] if tensor.dim() else 1 for tensor in values_in(data)]


def compare(
    operation: str, alike: list[str], sizes: list[int], *, must: bool = True
) -> list[list[int]] | None:
    """Collective: return the sizes of each rank, None if they are the same on all.

    torch's all_gather returns garbage for shapes that differ, so they are compared beforehand.

    Raises:
        ValueError: on all ranks, if ``alike`` differs and ``must`` not for one of them.
    """
    # One small all-gather of a digest in the usual case; the objects follow only if it differs.
    text = repr((alike, sizes)).encode()
    # Python's own hash of a text differs between processes.
    digest = list(hashlib.blake2b(text, digest_size=16).digest())
    mark = torch.tensor(digest, dtype=torch.uint8, device="cpu")
    marks = gather_tensor(on_backend(mark)).reshape(world_size(), -1)
    if bool((marks == marks[0]).all()):
        return None
    held = exchange((alike, sizes, must))
    calls = [Call(operation, tuple(lines)) for lines, _, _ in held]
    if len(set(calls)) > 1 and any(must for _, _, must in held):
        raise ValueError(f"this cannot be combined. {differences(calls)}")
    return [sizes for _, sizes, _ in held]


def pad_across_processes(
    tensor: T,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    debug: bool | None = None,
) -> T:
    """Pad each tensor along ``dim`` to the largest size on any process.

    Args:
        tensor: a tensor, a numpy array or a nested structure; tensors may differ between processes
            along ``dim``. Numbers and nested tensors are not changed.
        dim: the dimension to pad, from the end if negative; tensors without it are not changed.
        pad_index: the value to fill with.
        pad_first: put the padding in front instead of behind.
        debug: as for :func:`gather`.

    Returns:
        The same structure; tensors that need no padding are the same objects.

    Raises:
        ValueError: on all processes, if their structures differ, or their tensors differ in more
            than this dimension.
        TypeError: as for :func:`gather`.
        DistributedOperationException: in debug mode, if the calls of the processes differ.

    Warns:
        UserWarning: there is a nested tensor.

    Example:
        >>> import torch
        >>> from accel_callbacks import pad_across_processes
        >>> pad_across_processes(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """

    def text_of(tensor: torch.Tensor) -> str:
        shape: list[object] = ["*"] if tensor.is_nested else list(tensor.shape)
        if _has(tensor, dim):
            shape[dim] = "*"
        return whole(tensor, shape)

    begin(
        "pad_across_processes",
        debug,
        lambda: contents(tensor, text_of),
        dim=dim,
        pad_index=pad_index,
        pad_first=pad_first,
    )
    sizes = None
    if world_size() > 1:
        lengths = [each.shape[dim] for each in values_in(tensor) if _has(each, dim)]
        sizes = compare("pad_across_processes", contents(tensor, text_of), lengths)
    refuse_others("pad_across_processes", tensor, "gather_object")
    if any(each.is_nested for each in values_in(tensor)):
        warn(
            "a nested tensor has no size to pad, so it stays as it is, and cannot be gathered: "
            "convert it with .to_padded_tensor(0) first.",
            NestedTensorWarning,
        )
    if sizes is None:
        return tensor
    largest = map(max, zip(*sizes, strict=True))
    return map_values(tensor, _padder(dim, largest, pad_index, pad_first))


def _has(tensor: torch.Tensor, dim: int) -> bool:
    return not tensor.is_nested and -tensor.dim() <= dim < tensor.dim()


def _padder(
    dim: int, largest: Any, value: float, first: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that pads each tensor it is called with to the next size of ``largest``."""

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        missing = next(largest) - tensor.shape[dim] if _has(tensor, dim) else 0
        if missing == 0:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        filler = tensor.new_full(shape, value)
        return torch.cat([filler, tensor] if first else [tensor, filler], dim=dim)

    return pad


def reduce(
    tensor: T,
    reduction: str = "mean",
    scale: float = 1.0,
    *,
    weight: float | torch.Tensor | None = None,
    debug: bool | None = None,
) -> T:
    """Combine each tensor and number over all processes, element by element.

    Processes that share a model, and have read the same batch, are not told apart: each counts.

    Args:
        tensor: a tensor, a numpy array, a number, or a nested structure of them, of the same shape
            on all processes. Dtypes are kept, and integers are exact, but their mean is a float and
            the sum of bools counts those that are true. Low precision is summed in float32.
        reduction: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, or ``"none"`` for this process's
            own values.
        scale: factor on the result; a float other than 1 turns integers into floats.
        weight: with ``"mean"``, the weight of this process, for example its number of samples, so
            that unequal shares give the true mean. With 0, the values of this process are ignored.
            Pass it on all processes or on none (``None``, equal weights).
        debug: first compare what the processes hold; read from ``ACCEL_DEBUG`` if ``None``.

    Returns:
        The same structure with new, detached tensors; arrays come back as arrays, and numbers as
        numbers.

    Raises:
        ValueError: an unknown reduction, or a weight with another reduction than the mean.
        TypeError: a sparse tensor, ``"max"`` and ``"min"`` of complex numbers, or an object as for
            :func:`gather`.
        DistributedOperationException: in debug mode, if the calls of the processes differ.

    Example:
        >>> import torch
        >>> from accel_callbacks import reduce
        >>> reduce({"loss": torch.tensor([1.0, 3.0]), "n": 4}, reduction="sum", scale=2)
        {'loss': tensor([2., 6.]), 'n': 8}
    """
    _check(reduction, weight)
    arguments: dict[str, Any] = {"reduction": reduction}
    if reduction == "mean":
        arguments["weighted"] = weight is not None
    begin("reduce", debug, lambda: contents(tensor, whole), **arguments)
    refuse_others("reduce", tensor, "gather_object")
    if reduction == "none":
        return _scale(tensor, scale)
    distributed = world_size() > 1
    share = sum_of(weight) if distributed and weight is not None and values_in(tensor) else None

    def combine(leaf: torch.Tensor) -> torch.Tensor:
        return reduce_tensor(leaf, reduction, scale, weight, share)

    return _reduce_numbers(map_values(tensor, combine), reduction, scale, weight)


def _check(reduction: str, weight: float | torch.Tensor | None) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"reduction={reduction!r} is unknown; use one of {_REDUCTIONS}."
            + nearest(str(reduction), _REDUCTIONS)
        )
    weighted = weight is not None and (isinstance(weight, torch.Tensor) or weight != 1.0)
    if weighted and reduction != "mean":
        raise ValueError('weight= belongs to reduction="mean"; leave it out otherwise.')


def _scale(data: T, scale: float) -> T:
    if scale == 1:
        return map_values(data, lambda tensor: tensor.detach().clone())
    scaled = map_values(data, lambda tensor: tensor * scale)
    return map_leaves(scaled, lambda number: number * scale, is_number)


def _reduce_numbers(
    data: T, reduction: str, scale: float, weight: float | torch.Tensor | None
) -> T:
    """Combine Python's numbers in Python, where they are exact and may be of mixed types."""

    def combine(numbers: list[Any]) -> Iterator[Any]:
        alone = world_size() == 1  # the weight is then irrelevant, even if it is 0
        held = exchange((1.0 if weight is None or alone else float(weight), numbers))
        weights = [weight for weight, _ in held]
        for column in zip(*(row for _, row in held), strict=True):
            result = _COMBINE[reduction](column, weights)
            yield result if scale == 1 else result * scale

    return _replace_numbers(data, combine)


def _mean(numbers: tuple[Any, ...], weights: list[float]) -> Any:
    counted = [(n, w) for n, w in zip(numbers, weights, strict=True) if w != 0]
    total = sum(w for _, w in counted)
    return sum(n * w for n, w in counted) / total if total else math.nan


def _extreme(numbers: tuple[Any, ...], largest: bool) -> Any:
    odd = next((number for number in numbers if number != number), None)
    if odd is not None:
        return odd  # nan, as torch's max and min return it
    return max(numbers) if largest else min(numbers)


_COMBINE: dict[str, Callable[[tuple[Any, ...], list[float]], Any]] = {
    "sum": lambda numbers, _: sum(numbers),
    "mean": _mean,
    "max": lambda numbers, _: _extreme(numbers, largest=True),
    "min": lambda numbers, _: _extreme(numbers, largest=False),
}


def broadcast(tensor: T, from_process: int = 0, *, debug: bool | None = None) -> T:
    """Broadcast the tensors and numbers of ``from_process`` to every process.

    Args:
        tensor: a tensor, a numpy array, a number, or a nested structure of them, of the same shape
            and type on all processes (for what may differ, see :func:`broadcast_object`).
        from_process: the rank that sends.
        debug: as for :func:`reduce`.

    Returns:
        The same structure with new, detached tensors.

    Raises:
        ValueError: the rank does not exist.
        TypeError: a sparse tensor; or an object, see :func:`broadcast_object`.
        DistributedOperationException: in debug mode, if the calls of the processes differ.

    Example:
        >>> import torch
        >>> from accel_callbacks import broadcast
        >>> broadcast([torch.tensor([1, 2]), 0.5])
        [tensor([1, 2]), 0.5]
    """
    source = source_of(from_process)
    begin("broadcast", debug, lambda: contents(tensor, whole), from_process=from_process)
    refuse_others("broadcast", tensor, "broadcast_object")
    sent = map_values(tensor, lambda leaf: broadcast_tensor(leaf, source))
    with explained("broadcast"):
        return _replace_numbers(sent, lambda numbers: send_object(numbers, source))


@explained("gather")
def gather_tensor(tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Concatenate along dimension 0 in rank order; a scalar becomes an entry for each rank.

    Args:
        tensor: of the same dtype and shape on all ranks, except for its first dimension.
        sizes: that dimension on each rank; None if it is the same on all.
    """
    if is_sharded(tensor):
        return full_tensor(tensor)
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
    received = _all_gather(sent, world)
    parts = [part[: count * row] for part, count in zip(received, counts, strict=True)]
    return _as_tensor(received.reshape(-1) if sizes is None else torch.cat(parts), local, shape)


def _all_gather(sent: torch.Tensor, world: int) -> torch.Tensor:
    """Gather a flat tensor into one of shape (world, elements)."""
    received = sent.new_empty(world, len(sent))
    try:
        # Into one block: a list makes NCCL gather into a second block, and copy it from there.
        # torch 2.13 renamed it, and warns of the old name at each call.
        name = (
            "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        )
        getattr(dist, name)(received.view(-1), sent, group=group_for(sent))
    except RuntimeError as error:
        # Backends such as MPI lack it, and say so before they send anything.
        if "support" not in str(error) or "_allgather_base" not in str(error):
            raise
        dist.all_gather(list(received.unbind(0)), sent, group=group_for(sent))
    return received


@explained("broadcast")
def broadcast_tensor(tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Return the tensor of rank ``source``, as a new one."""
    local = dense(tensor)
    if world_size() == 1 or local.numel() == 0:
        return local.clone()
    data = _as_bytes(local).clone()
    dist.broadcast(data, src=source, group=group_for(data))
    return _as_tensor(data, local, local.shape)


@explained("reduce")
def reduce_tensor(
    tensor: torch.Tensor,
    reduction: str,
    scale: float,
    weight: float | torch.Tensor | None,
    share: torch.Tensor | None,
) -> torch.Tensor:
    """Combine element by element, in a dtype that neither rounds nor overflows in between.

    Args:
        tensor: of the same shape on all ranks.
        reduction: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        scale: factor on the result.
        weight: of this rank in the mean, None for equal weights.
        share: the sum of all weights, if there are weights.
    """
    local = dense(tensor)
    unordered = local.dtype.is_complex or local.dtype is torch.uint64
    if unordered and reduction not in ("sum", "mean"):
        raise TypeError(
            f"{reduction} of {local.dtype} does not exist; use another type or reduction."
        )
    world = world_size()
    value = on_backend(local) if world > 1 else local
    value = value.to(_sum_type(value, reduction), copy=True)
    if world > 1:
        if weight is not None and share is not None:
            value = _apply_weight(value, weight)
        operation = "sum" if reduction == "mean" else reduction
        operator = getattr(dist.ReduceOp, operation.upper())
        dist.all_reduce(value, operator, group=group_for(value))
        if reduction == "mean":
            value = value / (world if share is None else _beside(share, value))
    if scale != 1:
        value = value * scale
    counted = reduction == "sum" or scale != 1
    return value.to(local.device, _result_type(local.dtype, value.dtype, counted))


def _apply_weight(value: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    # A rank without samples may hold the mean of nothing, and 0 * nan is nan.
    if isinstance(weight, torch.Tensor):
        factor = weight.to(value.device, value.real.dtype)
        return torch.where(factor == 0, torch.zeros_like(value), value * factor)
    # A number goes with the kernel; a tensor made of it would block until it is on the device.
    return value * weight if weight != 0 else torch.zeros_like(value)


def _beside(share: torch.Tensor, value: torch.Tensor) -> float | torch.Tensor:
    """Return a sum of weights to divide by, as a number where it would have to be copied."""
    if share.device.type == "cpu" and value.device.type != "cpu":
        return float(share)
    return share.to(value.device, value.real.dtype)


@explained("reduce")
def sum_of(value: float | torch.Tensor) -> torch.Tensor:
    """Return the sum of a number over all ranks, in double precision."""
    if isinstance(value, torch.Tensor):
        share = value.detach()
    else:
        share = torch.tensor(value, dtype=torch.float64, device="cpu")
    total = on_backend(share).to(torch.float64, copy=True)
    dist.all_reduce(total, group=group_for(total))
    return total


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached, contiguous and resolved tensor; raise for those of other kinds."""
    if is_sharded(tensor):
        raise TypeError(
            "a DTensor is sharded over the processes already, so it cannot be reduced or sent: "
            "gather() returns the whole tensor, and its own sum(), mean() or to_local() a part."
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        how = "to_padded_tensor(0)" if tensor.is_nested else "to_dense()"
        raise TypeError(
            f"a tensor of layout {tensor.layout} cannot be sent; convert it with .{how} first."
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = on_backend(tensor).reshape(-1)
    # A tensor of one element counts as contiguous with any stride, and view(uint8) wants 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _as_tensor(data: torch.Tensor, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return data.view(like.dtype).reshape(tuple(shape)).to(like.device)


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _sum_type(value: torch.Tensor, reduction: str) -> torch.dtype:
    dtype = value.dtype
    if _is_whole(dtype):
        exact = torch.float32 if value.device.type == "mps" else torch.float64
        return exact if reduction == "mean" else torch.int64
    if dtype.is_complex:
        return torch.complex64 if dtype is torch.complex32 else dtype
    return dtype if dtype is torch.float64 else torch.float32


def _result_type(dtype: torch.dtype, worked: torch.dtype, counted: bool) -> torch.dtype:
    """Return the dtype itself, but float for means and fractions of integers, int64 for counts."""
    if not _is_whole(dtype):
        return dtype
    if not _is_whole(worked):
        return torch.get_default_dtype()
    return torch.int64 if dtype is torch.bool and counted else dtype
