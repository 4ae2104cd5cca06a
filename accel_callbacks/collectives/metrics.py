"""Gather each sample of a batch once: drop the repetitions that a loader has read.

Lists and tuples of objects are joined over all ranks, and so is a list of samples: one of records
(dicts, say, of the boxes in an image), or one with as many entries as the batch has samples. Of the
rest each tensor is gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import chain, compress, count
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from accel_callbacks import collectives
from accel_callbacks.collectives.nested import (
    is_other,
    is_value,
    leaves,
    map_leaves,
    map_tensors,
    map_values,
    values_in,
)

__all__ = ["Tally", "gather_counted", "gather_counted_objects", "is_joinable", "rows_beside_lists"]

T = TypeVar("T")


class _Form(IntEnum):
    """What the entries of a list or tuple are; the largest of all ranks counts."""

    OBJECTS = 0  # without a tensor
    RECORDS = 1  # dicts or dataclasses with the same keys
    BATCHES = 2  # tensors with a row for each entry: logits and labels of a batch of two
    SAMPLES = 3  # tensors alike, if there is one for each sample of the batch
    STRUCTURE = 4  # of any kinds


class Entries:
    """A leaf that stands for a list or tuple until the tensors around it are gathered too."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items


class _Sent(NamedTuple):
    """A tensor of an object on its way: one of a device would come to that of the sender."""

    tensor: torch.Tensor
    device: str


class Tally(Protocol):
    """The counts of a prepared loader's current batch; see ``DataLoaderShard``."""

    real: int
    padded: int
    kept: Sequence[int] | None
    trained: bool
    batch_sampler: Any  # None for a loader of ready batches, whose samples are not counted


def gather_counted(
    data: Any, active: Sequence[Tally], ranks: Sequence[int] | None = None, path: str = ""
) -> Any:
    """Collective: gather the tensors and the lists of objects of a structure, each sample once.

    Args:
        data: tensors of shape ``(batch, ...)``, or lists of objects, in any nesting.
        active: the loaders that are being iterated, the innermost last.
        ranks: one rank for each data rank, whose samples count; all ranks if None.
        path: of ``data``, for errors.

    Raises:
        TypeError: an object beside tensors, outside of lists.
        ValueError: the structures of the ranks differ.

    Example:
        >>> import torch
        >>> from accel_callbacks.collectives.metrics import gather_counted
        >>> gather_counted({"x": torch.ones(2), "names": ["a", "b"]}, [])
        {'x': tensor([1., 1.]), 'names': ['a', 'b']}
    """
    hidden = map_leaves(data, Entries, is_joinable, by_key=True)
    bare = _without_lists(hidden)
    lists = [leaf.value.items for leaf in leaves(hidden, _is_entries, by_key=True)]
    forms = [_form(items) for items in lists]
    combines = any(map(values_in, compress(lists, forms))) or bool(values_in(bare))
    head = [combines, *chain(*zip(map(len, lists), forms, strict=True))]
    compared = None
    if collectives.world_size() > 1:
        # Before any branch that depends on ``data``, so that all ranks raise if structures differ.
        alike = collectives.rows_held(hidden, path)
        own = [*head, *collectives.rows_of(bare)]
        compared = collectives.compare("gather_for_metrics", alike, own, must=combines)
    on_all = _of_ranks(compared or [head] * collectives.world_size(), ranks)
    if not any(row[0] for row in on_all):
        return gather_counted_objects(data, active, ranks)
    way = "gather_for_metrics(..., use_gather_object=True)"
    collectives.refuse_others("gather_for_metrics", bare, way, path)
    pairs = range(1, len(head), 2)
    joins = [_are_joined([row[at : at + 2] for row in on_all], active) for at in pairs]
    joined = iter(_join_lists(list(compress(lists, joins)), active, ranks))
    paths = [leaf.path for leaf in leaves(hidden, _is_entries, by_key=True, path=path)]
    settled = iter(
        [
            Entries(next(joined) if join else _of_structure(items, active, ranks, path))
            for items, join, path in zip(lists, joins, paths, strict=True)
        ]
    )
    hidden = map_leaves(hidden, lambda _: next(settled), _is_entries, by_key=True)
    rows = None if compared is None else [row[len(head) :] for row in compared]
    counted = _gather_tensors(hidden, rows, active, ranks)
    counted = collectives.numbers_to_tensors(counted, ranks)
    return map_leaves(counted, lambda entries: entries.items, _is_entries)


def _gather_tensors(
    data: T, sizes: list[list[int]] | None, active: Sequence[Tally], ranks: Sequence[int] | None
) -> T:
    """Collective: gather the tensors outside of lists, each sample once."""
    world = collectives.world_size()
    per_sample = iter([tensor.dim() > 0 for tensor in values_in(data)])
    numbers = count()

    def keep_real(gathered: torch.Tensor) -> torch.Tensor:
        index = next(numbers)
        each = [len(gathered) // world] * world if sizes is None else [s[index] for s in sizes]
        # A tensor without dimensions becomes one with an entry for each rank, not each sample.
        keep = _counts(_of_ranks(each, ranks), active, per_sample=next(per_sample))
        if keep == each:
            return gathered
        pieces = zip(_of_ranks(torch.split(gathered, each), ranks), keep, strict=True)
        return torch.cat([piece[:count] for piece, count in pieces])

    return map_values(collectives.gather_sized(data, sizes), keep_real)


def _of_structure(
    items: Sequence[Any], active: Sequence[Tally], ranks: Sequence[int] | None, path: str
) -> Sequence[Any]:
    """Collective: gather the entries of a list each by itself."""
    # As a dict, so that the list is not taken for one again.
    gathered = gather_counted(dict(enumerate(items)), active, ranks, path)
    return type(items)(gathered.values()) if type(items) is tuple else [*gathered.values()]


def rows_beside_lists(data: Any) -> list[str]:
    """Return what must be equal on all ranks to gather, as far as it is known in advance.

    Example:
        >>> from accel_callbacks.collectives.metrics import rows_beside_lists
        >>> rows_beside_lists({"x": torch.ones(2), "names": ["a", "b"]})
        ["['x']: float32 (*) on cpu"]
    """
    bare = _without_lists(map_leaves(data, Entries, is_joinable, by_key=True))
    return collectives.rows_held(bare) if values_in(bare) else []


def _without_lists(hidden: Any) -> Any:
    return map_leaves(hidden, lambda _: None, _is_entries, by_key=True)


def gather_counted_objects(
    data: Any, active: Sequence[Tally], ranks: Sequence[int] | None = None
) -> list[Any]:
    """Collective: gather lists and tuples into one list, each sample once, else one entry a rank.

    Example:
        >>> from accel_callbacks.collectives.metrics import gather_counted_objects
        >>> gather_counted_objects(["a", "b"], []), gather_counted_objects({"a": 1}, [])
        (['a', 'b'], [{'a': 1}])
    """
    return _join(_of_ranks(_on_all(data), ranks), active)


def _on_all(data: Any) -> list[Any]:
    """Collective: return what each rank holds, with tensors on the kind of device that they had."""
    if collectives.world_size() == 1:
        return collectives.all_objects(map_tensors(data, torch.Tensor.detach))

    def send(tensor: torch.Tensor) -> _Sent:
        # Copied, because pickle sends all of the memory that a tensor is a part of.
        return _Sent(tensor.detach().to("cpu", copy=True), tensor.device.type)

    def receive(sent: _Sent) -> torch.Tensor:
        return sent.tensor.to(sent.device)

    received = collectives.all_objects(map_tensors(data, send))
    return map_leaves(received, receive, lambda leaf: isinstance(leaf, _Sent))


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


def _is_entries(leaf: Any) -> bool:
    return isinstance(leaf, Entries)


def is_joinable(value: Any) -> bool:
    """Return True for a list or tuple whose entries may be those of samples."""
    if isinstance(value, list):
        return True
    if type(value) is not tuple:
        return False
    return any(map(is_other, value)) or (_are_records(value) and not _holds_numbers(value))


def _holds_numbers(items: Any) -> bool:
    """Return True for a structure without tensors and objects."""
    return not leaves(items, lambda leaf: is_value(leaf) or is_other(leaf))


def _form(items: Sequence[Any]) -> _Form:
    is_list, records = isinstance(items, list), _are_records(items)
    if not (collectives.tensors_in(items) if is_list else records):
        return _Form.OBJECTS
    if records and is_list:
        return _Form.RECORDS
    alike = {_text(entry) for entry in items}
    if not records and (len(alike) > 1 or () in alike):
        return _Form.STRUCTURE
    rows = {len(tensor) if tensor.dim() else None for tensor in values_in(items)}
    one = records and len(items) == 1
    return _Form.BATCHES if rows == {len(items)} and not one else _Form.SAMPLES


def _text(entry: Any) -> tuple[str, ...]:
    """Return where an entry has tensors, of which dtypes and numbers of dimensions."""
    held = leaves(entry, is_value, by_key=True)
    return tuple(f"{path} {value.dtype} {value.ndim}" for path, value in held)


def _are_records(items: Sequence[Any]) -> bool:
    """Return True for dicts or dataclasses that all have the same keys."""
    keys = {_keys(item) for item in items}
    return len(keys) == 1 and None not in keys


def _keys(item: Any) -> frozenset[Any] | None:
    if isinstance(item, Mapping):
        return frozenset(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return frozenset(field.name for field in dataclasses.fields(item))
    return None


def _are_joined(on_ranks: Sequence[Sequence[int]], active: Sequence[Tally]) -> bool:
    """Return True if the entries of a list, of these lengths and forms, are joined over ranks."""
    form = max((form for length, form in on_ranks if length), default=_Form.OBJECTS)
    if form != _Form.SAMPLES:
        return form <= _Form.RECORDS
    total = sum(length for length, _ in on_ranks)
    loader = _loader_of(total, active)
    return loader is not None and loader.padded == total and loader.batch_sampler is not None


def _join_lists(
    lists: list[Sequence[Any]], active: Sequence[Tally], ranks: Sequence[int] | None
) -> list[list[Any]]:
    """Collective: join lists, such as the texts of a batch, over all ranks."""
    if not lists:
        return []
    parts = zip(*_of_ranks(_on_all(lists), ranks), strict=True)
    return [_join(part, active) for part in parts]
