"""Inputs split over the processes, for inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from accel_callbacks.collectives import map_leaves
from accel_callbacks.distributed.topology import process_rank

__all__ = ["split_between_processes"]

T = TypeVar("T")


@contextmanager
def split_between_processes(inputs: T, apply_padding: bool = False) -> Iterator[T]:
    """Context manager: this process's share of ``inputs``, which stay as they are.

    The shares follow each other in rank order; the first ones are longer by one where the number
    of items does not divide.

    Args:
        inputs: a list, a tuple, another sequence, a tensor or a NumPy array (split along its first
            dimension), a ``datasets.Dataset``, or a mapping of such values of the same length.
        apply_padding: repeat the last item, so that all processes get the same number (to gather
            the results, say; drop what is too much then).

    Yields:
        The share, of the same kind as ``inputs``. With fewer items than processes the last ones
        get none: an empty list, or a tensor of shape ``(0, ...)``.

    Raises:
        ValueError: the values of a mapping differ in length.
        TypeError: something that cannot be split, such as a text.

    Example:
        >>> from accel_callbacks import split_between_processes
        >>> with split_between_processes({"id": [1, 2], "prompt": ["a", "b"]}) as share:
        ...     print(share)
        {'id': [1, 2], 'prompt': ['a', 'b']}
    """
    rank, world = process_rank()[:2]
    length = _length(inputs)
    size, longer = divmod(length, world)
    start = rank * size + min(rank, longer)
    rows = list(range(start, start + size + (rank < longer)))
    if apply_padding and length:
        rows += [length - 1] * (size + (longer > 0) - len(rows))
    # What is split is no Mapping, so the walk ends there and lists are not entered.
    yield map_leaves(inputs, lambda items: _taken(items, rows), _is_splittable)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        _way_to_take(inputs)
        return len(inputs)
    lengths = {key: _length(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the values must have the same length to be split, but have {lengths}.")
    return next(iter(lengths.values()), 0)


def _is_splittable(inputs: Any) -> bool:
    return not isinstance(inputs, Mapping)


def _taken(inputs: Any, rows: list[int]) -> Any:
    return _way_to_take(inputs)(inputs, rows)


def _way_to_take(inputs: Any) -> Callable[[Any, list[int]], Any]:
    """How to take rows from inputs of this kind."""
    for belongs, take in _WAYS:
        if belongs(inputs):
            return take
    raise TypeError(
        f"a {type(inputs).__name__} cannot be split between processes: pass a list, a tuple, a "
        "tensor, an array, a datasets.Dataset, or a mapping of these."
    )


def _rows_of_tensor(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return tensor[torch.tensor(rows, dtype=torch.long, device=tensor.device)]


def _rows_of_sequence(items: Sequence[Any], rows: list[int]) -> Any:
    taken = [items[row] for row in rows]
    if isinstance(items, tuple):
        return tuple(taken)
    if isinstance(items, list):
        return taken if type(items) is list else cast(Any, type(items))(taken)
    return taken


def _is_array(inputs: Any) -> bool:
    return hasattr(inputs, "__array__") and getattr(inputs, "ndim", 0) > 0


def _is_dataset(inputs: Any) -> bool:
    selects = callable(getattr(inputs, "select", None)) and hasattr(inputs, "__len__")
    return selects and not isinstance(inputs, torch.Tensor)


def _is_sequence(inputs: Any) -> bool:
    return isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes))


_WAYS: tuple[tuple[Callable[[Any], bool], Callable[[Any, list[int]], Any]], ...] = (
    (_is_sequence, _rows_of_sequence),
    (lambda inputs: _is_array(inputs) and isinstance(inputs, torch.Tensor), _rows_of_tensor),
    (lambda inputs: hasattr(inputs, "iloc"), lambda frame, rows: frame.iloc[rows]),
    (_is_array, lambda array, rows: array[rows]),
    (_is_dataset, lambda dataset, rows: dataset.select(rows)),
)
