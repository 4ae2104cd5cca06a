"""Gather and pad: tensors that may have another size on each process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from accel_callbacks.collectives.debug import Call, begin, contents, differences, whole
from accel_callbacks.collectives.exchange import exchange
from accel_callbacks.collectives.group import on_backend, world_size
from accel_callbacks.collectives.nested import (
    is_number,
    leaves,
    map_leaves,
    map_tensors,
    tensors_in,
)
from accel_callbacks.collectives.tensors import gather_tensor

__all__ = ["gather", "gather_sized", "numbers_to_tensors", "pad_across_processes", "rows_held"]
__all__ += ["sizes_on_all"]

T = TypeVar("T")


def gather(tensor: T, *, debug: bool | None = None) -> T:
    """Concatenate each tensor over all processes, along dimension 0, in rank order.

    Args:
        tensor: a tensor or a nested structure (list, tuple, named tuple, mapping of any class,
            dataclass) of tensors of shape ``(n, ...)`` and any type, the same structure on all
            processes; ``n`` may differ between them. Tensors without dimensions and Python's
            numbers give one entry for each process. Sets, text and other objects stay as they are.
        debug: compare first what the processes hold; what ``ACCEL_DEBUG`` says if ``None``.

    Returns:
        The same structure with detached tensors of shape ``(sum of all n, ...)``.

    Raises:
        ValueError: on all processes, where they hold another structure, or tensors that differ
            in more than their first dimension.
        TypeError: a sparse tensor.
        DistributedOperationException: in debug mode, where the processes do different things.

    Example:
        >>> import torch
        >>> from accel_callbacks import gather
        >>> gather({"loss": torch.tensor(2.0), "n": 3})
        {'loss': tensor([2.]), 'n': tensor([3])}
    """
    begin("gather", debug, lambda: rows_held(tensor))
    return numbers_to_tensors(gather_sized(tensor, sizes_on_all(tensor)))


def gather_sized(data: T, sizes: list[list[int]] | None) -> T:
    """The tensors of :func:`gather`, where :func:`sizes_on_all` was asked already."""
    if sizes is None:
        return map_tensors(data, gather_tensor)
    each = iter(zip(*sizes, strict=True))
    return map_tensors(data, lambda tensor: gather_tensor(tensor, next(each)))


def numbers_to_tensors(data: T) -> T:
    """Collective: each of Python's numbers as a tensor with an entry for each process."""
    own = [leaf.value for leaf in leaves(data, is_number, by_key=True)]
    if not own:
        return data
    each = iter(zip(*exchange(own), strict=True))
    return map_leaves(data, lambda _: _as_tensor(next(each)), is_number, by_key=True)


def _as_tensor(numbers: tuple[Any, ...]) -> torch.Tensor:
    exact = torch.float64 if any(isinstance(number, float) for number in numbers) else None
    complexes = any(isinstance(number, complex) for number in numbers)
    return torch.tensor(numbers, dtype=torch.complex128 if complexes else exact)


def sizes_on_all(data: Any) -> list[list[int]] | None:
    """Collective: for each process the first dimension of each tensor, None if they are alike.

    torch gathers what differs into garbage, so the processes compare what they hold beforehand.

    Raises:
        ValueError: see :func:`gather`.
    """
    if world_size() == 1:
        return None
    own = [tuple(tensor.shape[:1]) or (1,) for tensor in tensors_in(data)]
    sizes = _compare("gather", rows_held(data), [size for (size,) in own])
    return sizes


def rows_held(data: Any) -> list[str]:
    """What must be alike to be gathered: all but the first dimension of each tensor."""
    return contents(data, lambda tensor: whole(tensor, ("*", *tensor.shape[1:])))


def _compare(operation: str, alike: list[str], own: list[int]) -> list[list[int]] | None:
    """Collective: what each process has for ``own``, None if it is the same.

    Raises:
        ValueError: on all processes, where ``alike`` is not.
    """
    text = repr((alike, own)).encode()
    mark = torch.tensor(list(hashlib.blake2b(text, digest_size=16).digest()), dtype=torch.uint8)
    marks = gather_tensor(on_backend(mark)).reshape(world_size(), -1)
    if bool((marks == marks[0]).all()):
        return None
    held = exchange((alike, own))
    calls = [Call(operation, tuple(lines)) for lines, _ in held]
    if len(set(calls)) > 1:
        raise ValueError(f"this cannot be combined. {differences(calls)}")
    return [sizes for _, sizes in held]


def pad_across_processes(
    tensor: T,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    debug: bool | None = None,
) -> T:
    """Pad each tensor along ``dim`` to the largest size that any process has there.

    Args:
        tensor: a tensor or nested structure; tensors may differ between processes along ``dim``.
        dim: the dimension to pad, from the end if negative; tensors that lack it stay as they are.
        pad_index: the value to fill with.
        pad_first: put the padding in front instead of behind.
        debug: as for :func:`gather`.

    Returns:
        The same structure; tensors that need no padding are returned as they are.

    Raises:
        ValueError: on all processes, where they hold another structure, or tensors that differ
            in more than this dimension.
        DistributedOperationException: in debug mode, where the processes do different things.

    Example:
        >>> import torch
        >>> from accel_callbacks import pad_across_processes
        >>> pad_across_processes(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """

    def text_of(tensor: torch.Tensor) -> str:
        shape: list[object] = list(tensor.shape)
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
    if world_size() == 1:
        return tensor
    own = [each.shape[dim] for each in tensors_in(tensor) if _has(each, dim)]
    sizes = _compare("pad_across_processes", contents(tensor, text_of), own)
    if sizes is None:
        return tensor
    largest = map(max, zip(*sizes, strict=True))
    return map_tensors(tensor, _padder(dim, largest, pad_index, pad_first))


def _has(tensor: torch.Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def _padder(
    dim: int, largest: Any, value: float, first: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Pads one tensor after the other, each to the next size of ``largest``."""

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        missing = next(largest) - tensor.shape[dim] if _has(tensor, dim) else 0
        if missing == 0:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        filler = tensor.new_full(shape, value)
        return torch.cat([filler, tensor] if first else [tensor, filler], dim=dim)

    return pad
