"""Reduce and broadcast: tensors and numbers of the same shape on all processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from accel_callbacks.collectives.debug import begin, contents, whole
from accel_callbacks.collectives.exchange import exchange, send_object, source_of
from accel_callbacks.collectives.group import world_size
from accel_callbacks.collectives.nested import (
    is_number,
    leaves,
    map_leaves,
    map_tensors,
    tensors_in,
)
from accel_callbacks.collectives.tensors import broadcast_tensor, reduce_tensor, sum_of
from accel_callbacks.errors import nearest

__all__ = ["broadcast", "reduce"]

T = TypeVar("T")
_REDUCTIONS = ("sum", "mean", "max", "min", "none")


def reduce(
    tensor: T,
    reduction: str = "mean",
    scale: float = 1.0,
    *,
    weight: float | torch.Tensor | None = None,
    debug: bool | None = None,
) -> T:
    """Combine each tensor and number over all processes, element by element.

    Args:
        tensor: a tensor, a number, or a nested structure of them, of the same shape on all
            processes. Types stay as they are, and whole numbers exact, but their mean is a float
            and the sum of bools counts those that are true. Low precision is summed in float32.
        reduction: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, or ``"none"`` for what this
            process has.
        scale: factor on the result; a float other than 1 makes floats of whole numbers.
        weight: with ``"mean"``, how much this process counts, for example its number of
            samples, so that unequal shares give the true mean. Where it is 0, what this process
            has does not matter. Give it on all processes or on none (``None``, all count alike).
        debug: compare first what the processes hold; what ``ACCEL_DEBUG`` says if ``None``.

    Returns:
        The same structure with new, detached tensors.

    Raises:
        ValueError: an unknown reduction, or a weight with another reduction than the mean.
        TypeError: a sparse tensor, or ``"max"`` and ``"min"`` of complex numbers.
        DistributedOperationException: in debug mode, where the processes do different things.

    Example:
        >>> import torch
        >>> from accel_callbacks import reduce
        >>> reduce({"loss": torch.tensor([1.0, 3.0]), "n": 4}, reduction="sum", scale=2)
        {'loss': tensor([2., 6.]), 'n': 8}
    """
    _check(reduction, weight)
    given = weight is not None
    if reduction == "mean":
        arguments = {"reduction": reduction, "weighted": given}
    else:
        arguments = {"reduction": reduction}
    begin("reduce", debug, lambda: contents(tensor, whole), **arguments)
    if reduction == "none":
        return _scaled(tensor, scale)
    distributed = world_size() > 1
    share = sum_of(weight) if distributed and weight is not None and tensors_in(tensor) else None

    def combine(one: torch.Tensor) -> torch.Tensor:
        return reduce_tensor(one, reduction, scale, weight, share)

    return _reduce_numbers(map_tensors(tensor, combine), reduction, scale, weight)


def _check(reduction: str, weight: float | torch.Tensor | None) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"reduction={reduction!r} is unknown; use one of {_REDUCTIONS}."
            + nearest(str(reduction), _REDUCTIONS)
        )
    weighted = weight is not None and (isinstance(weight, torch.Tensor) or weight != 1.0)
    if weighted and reduction != "mean":
        raise ValueError('weight= belongs to reduction="mean"; leave it out otherwise.')


def _scaled(data: T, scale: float) -> T:
    copied = map_tensors(data, lambda one: one.detach().clone() if scale == 1 else one * scale)
    return map_leaves(copied, lambda one: one if scale == 1 else one * scale, is_number)


def _reduce_numbers(
    data: T, reduction: str, scale: float, weight: float | torch.Tensor | None
) -> T:
    """Python's numbers are combined in Python: exact, and of mixed kinds."""
    own = [leaf.value for leaf in leaves(data, is_number, by_key=True)]
    if not own:
        return data
    alone = world_size() == 1  # and then weighs all that there is
    held = exchange((1.0 if weight is None or alone else float(weight), own))
    weights = [weight for weight, _ in held]
    each = iter(zip(*(numbers for _, numbers in held), strict=True))

    def combine(_: Any) -> Any:
        result = _COMBINE[reduction](next(each), weights)
        return result if scale == 1 else result * scale

    return map_leaves(data, combine, is_number, by_key=True)


def _mean(numbers: tuple[Any, ...], weights: list[float]) -> Any:
    counted = [(n, w) for n, w in zip(numbers, weights, strict=True) if w != 0]
    total = sum(w for _, w in counted)
    return sum(n * w for n, w in counted) / total if total else math.nan


def _extreme(numbers: tuple[Any, ...], largest: bool) -> Any:
    odd = next((number for number in numbers if number != number), None)
    if odd is not None:
        return odd  # no number is above or below it
    return max(numbers) if largest else min(numbers)


_COMBINE: dict[str, Callable[[tuple[Any, ...], list[float]], Any]] = {
    "sum": lambda numbers, _: sum(numbers),
    "mean": _mean,
    "max": lambda numbers, _: _extreme(numbers, largest=True),
    "min": lambda numbers, _: _extreme(numbers, largest=False),
}


def broadcast(tensor: T, from_process: int = 0, *, debug: bool | None = None) -> T:
    """Give every process the tensors and numbers that ``from_process`` holds.

    Args:
        tensor: a tensor, a number, or a nested structure of them, of the same shape and type on
            all processes (for objects that may differ, see :func:`broadcast_object`).
        from_process: the rank that sends.
        debug: as for :func:`reduce`.

    Returns:
        The same structure with new, detached tensors.

    Raises:
        ValueError: there is no such process.
        TypeError: a sparse tensor.
        DistributedOperationException: in debug mode, where the processes do different things.

    Example:
        >>> import torch
        >>> from accel_callbacks import broadcast
        >>> broadcast([torch.tensor([1, 2]), 0.5])
        [tensor([1, 2]), 0.5]
    """
    source = source_of(from_process)
    begin("broadcast", debug, lambda: contents(tensor, whole), from_process=from_process)
    sent = map_tensors(tensor, lambda one: broadcast_tensor(one, source))
    own = [leaf.value for leaf in leaves(sent, is_number, by_key=True)]
    if not own:
        return sent
    each = iter(send_object(own, source))
    return map_leaves(sent, lambda _: next(each), is_number, by_key=True)
