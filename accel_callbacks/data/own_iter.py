"""Prepared loaders of a class of the user's, which has an ``__iter__`` of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, cast

from torch.utils.data import DataLoader

from accel_callbacks import collectives
from accel_callbacks.collectives.nested import find_batch_size
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.data.order import length_of
from accel_callbacks.data.sources import Delivery

__all__ = ["class_with_iter"]

_OTHER_COUNT = (
    "{}.__iter__ gave {} batches for {} of super().__iter__(), by which a prepared loader counts "
    "its place: give one for each; leave samples out in the dataset, the sampler or collate_fn."
)
_NOT_OURS = (
    "{}.__iter__ gives batches that are not from super().__iter__(), so prepare() cannot share "
    "them among processes, nor begin within an epoch: iterate super().__iter__() in it."
)
_NO_END = (
    "{} has an __iter__ of its own over batches of {}, which does not say how many there are, and "
    "may have no end: for several processes, give the batch sampler a __len__ and the batches of "
    "one epoch."
)
_classes: dict[tuple[type[Any], type[Any]], type[DataLoaderShard]] = {}
_LIBRARIES = ("torch.", "torchdata.", "accel_callbacks.")


class _OwnIter(DataLoaderShard):
    """A loader whose batches go through the ``__iter__`` of the user's class."""

    _has_own_iter = True
    _user: type[DataLoader[Any]]
    _kind: type[DataLoaderShard]

    def __reduce__(self) -> Any:
        return _new_instance, (self._kind, self._user), self.__getstate__()

    def __len__(self) -> int:
        try:
            return super().__len__()
        except TypeError:
            return len(cast(DataLoader[Any], self.origin))  # by a length of its own

    def _run_own_iter(
        self, pairs: Iterator[tuple[Any, Delivery]]
    ) -> Iterator[tuple[Any, Delivery]]:
        counts: deque[Delivery] = deque()
        taken = given = 0

        def batches() -> Iterator[Any]:
            nonlocal taken
            for batch, delivery in pairs:
                taken += 1
                counts.append(delivery)
                yield batch

        self._delivered = batches()
        name = self._user.__name__
        for batch in self._user.__iter__(self):
            given += 1
            if given > taken > 0:
                raise RuntimeError(_OTHER_COUNT.format(name, given, taken))
            yield batch, counts.popleft() if taken else self._count_of(batch, given)
        if given != taken and taken:
            raise RuntimeError(_OTHER_COUNT.format(name, given, taken))

    def _count_of(self, batch: Any, number: int) -> Delivery:
        """Return the counts of a batch that the class has read by itself."""
        if self._first > 0 or collectives.world_size() > 1:
            raise RuntimeError(_NOT_OURS.format(self._user.__name__))
        size = find_batch_size(batch) or 1
        return Delivery(size, size, last=number == len(self))


class _BatchSource(DataLoader[Any]):
    """What ``super().__iter__()`` gives to the class of the user's."""

    _delivered: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._delivered


def class_with_iter(
    kind: type[DataLoaderShard], loader: DataLoader[Any], ranks: int = 1
) -> type[DataLoaderShard]:
    """Return the class of the prepared loader, one of the user's too if it has an ``__iter__``.

    Args:
        kind: of the loader.
        loader: the user's.
        ranks: processes that share its batches.

    Raises:
        ValueError: several processes cannot share them, because they may have no end.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accel_callbacks.data.loader import DataLoaderShard
        >>> from accel_callbacks.data.own_iter import class_with_iter
        >>> class_with_iter(DataLoaderShard, DataLoader([1])) is DataLoaderShard
        True
    """
    owner = next(base for base in type(loader).__mro__ if "__iter__" in vars(base))
    if f"{owner.__module__}.".startswith(_LIBRARIES):
        return kind
    batches = loader.batch_sampler
    if ranks > 1 and batches is not None and length_of(batches) is None:
        raise ValueError(_NO_END.format(type(loader).__name__, type(batches).__name__))
    return _combine(kind, type(loader))


def _combine(kind: type[DataLoaderShard], user: type[DataLoader[Any]]) -> type[DataLoaderShard]:
    if (kind, user) not in _classes:
        members = {"_kind": kind, "_user": user, "__module__": __name__, "__doc__": user.__doc__}
        bases = _OwnIter, kind, user, _BatchSource
        _classes[kind, user] = type(user.__name__, bases, members)
    return _classes[kind, user]


def _new_instance(kind: type[DataLoaderShard], user: type[DataLoader[Any]]) -> DataLoaderShard:
    made = _combine(kind, user)
    return made.__new__(made)
