"""Gather each sample of a batch once: drop the repetitions that a loader has read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from accel_callbacks import collectives

__all__ = ["Tally", "gather_counted", "gather_counted_objects"]

T = TypeVar("T")


class Tally(Protocol):
    """The counts of a prepared loader's current batch; see ``DataLoaderShard``."""

    real: int
    padded: int
    kept: Sequence[int] | None
    trained: bool


def gather_counted(data: Any, active: Sequence[Tally], ranks: Sequence[int] | None = None) -> Any:
    """Collective: gather the tensors and the lists of objects of a structure, each sample once.

    Args:
        data: tensors of shape ``(batch, ...)``, or lists of objects, in any nesting.
        active: the loaders that are being iterated, the innermost last.
        ranks: one rank for each data rank, whose samples count; all ranks if None.

    Example:
        >>> import torch
        >>> from accel_callbacks.collectives.metrics import gather_counted
        >>> gather_counted({"x": torch.ones(2), "names": ["a", "b"]}, [])
        {'x': tensor([1., 1.]), 'names': ['a', 'b']}
    """
    tensors = collectives.tensors_in(data)
    # Before any branch that depends on ``data``: it raises on all ranks if their structures differ.
    sizes = collectives.sizes_on_all(tensors)
    if not tensors:
        return gather_counted_objects(data, active, ranks)
    if not isinstance(data, torch.Tensor):
        data = _gather_lists(data, active, ranks)
    numbers = iter(range(len(tensors)))
    world = collectives.world_size()

    def keep_real(gathered: torch.Tensor) -> torch.Tensor:
        index = next(numbers)
        each = [len(gathered) // world] * world if sizes is None else [s[index] for s in sizes]
        sizes_of_ranks = _of_ranks(each, ranks)
        # A tensor without dimensions becomes one with an entry for each rank, not each sample.
        keep = _counts(sizes_of_ranks, active, per_sample=tensors[index].dim() > 0)
        if keep == each:
            return gathered
        pieces = zip(_of_ranks(torch.split(gathered, each), ranks), keep, strict=True)
        return torch.cat([piece[:count] for piece, count in pieces])

    counted = collectives.map_tensors(collectives.gather_sized(data, sizes), keep_real)
    counted = collectives.numbers_to_tensors(counted, ranks)
    return apply_to_collection(counted, _Joined, lambda joined: joined.items)


def gather_counted_objects(
    data: Any, active: Sequence[Tally], ranks: Sequence[int] | None = None
) -> list[Any]:
    """Collective: gather lists and tuples into one list, each sample once, else one entry a rank.

    Example:
        >>> from accel_callbacks.collectives.metrics import gather_counted_objects
        >>> gather_counted_objects(["a", "b"], []), gather_counted_objects({"a": 1}, [])
        (['a', 'b'], [{'a': 1}])
    """
    return _join(_of_ranks(collectives.all_objects(data), ranks), active)


def _of_ranks(pieces: Sequence[T], ranks: Sequence[int] | None) -> list[T]:
    """Return the pieces of these ranks: other ranks have read the same samples."""
    return list(pieces) if ranks is None else [pieces[rank] for rank in ranks]


def _join(parts: Sequence[Any], active: Sequence[Tally]) -> list[Any]:
    per_sample = all(isinstance(part, (list, tuple)) for part in parts)
    pieces = parts if per_sample else [[part] for part in parts]
    each = [len(piece) for piece in pieces]
    keep = _counts(each, active, per_sample=per_sample)
    return list(chain(*(piece[:count] for piece, count in zip(pieces, keep, strict=True))))


def _counts(each: list[int], active: Sequence[Tally], *, per_sample: bool) -> list[int]:
    """Return how many entries at the start of each rank's piece are kept, of this many."""
    total = sum(each)
    loader = _loader_of(total, active)
    if loader is None:
        return each
    whole = per_sample and total == loader.padded
    if loader.kept is not None:  # 0 for a rank that has read only repetitions
        counts = zip(loader.kept, each, strict=True)
        return [min(kept, size) if whole or not kept else size for kept, size in counts]
    if not whole:
        return each
    before = [sum(each[:rank]) for rank in range(len(each))]
    return [
        min(max(loader.real - start, 0), size) for start, size in zip(before, each, strict=True)
    ]


def _loader_of(total: int, active: Sequence[Tally]) -> Tally | None:
    """Return the innermost loader; of loaders in a ``zip``, the one with a batch of this size."""
    if not active:
        return None
    inner = active[-1]
    if inner.padded == total:
        return inner
    # In an evaluation inside of a training loop, the training loader's counts do not apply.
    beside = (loader for loader in reversed(active) if loader.trained == inner.trained)
    return next((loader for loader in beside if loader.padded == total), inner)


class _Joined:
    """A leaf that hides a joined list until the tensors around it are gathered too."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


def _gather_lists(data: Any, active: Sequence[Tally], ranks: Sequence[int] | None) -> Any:
    """Join lists without tensors, such as the texts of a batch, over all ranks."""
    lists: list[list[Any]] = []
    _map_plain_lists(data, lists.append)
    if not lists:
        return data
    on_all = _of_ranks(collectives.all_objects(lists), ranks)
    joined = iter([_Joined(_join(parts, active)) for parts in zip(*on_all, strict=True)])
    return _map_plain_lists(data, lambda _: next(joined))


def _map_plain_lists(data: Any, fn: Callable[[list[Any]], Any]) -> Any:
    def visit(items: list[Any]) -> Any:
        if not collectives.tensors_in(items):
            return fn(items)
        return [_map_plain_lists(item, fn) for item in items]

    return apply_to_collection(data, list, visit)
