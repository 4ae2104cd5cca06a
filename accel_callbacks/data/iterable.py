"""Sharding of datasets that can only be iterated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

__all__ = ["CollateShare", "IterableShards"]


class IterableShards(IterableDataset[tuple[list[Any], int]]):
    """Reads the whole stream and keeps this process's piece of each global batch.

    Each item is ``(samples, real)``: the samples of this process, and how many samples the
    global batch really has, so that padding of the tail is known even across loader workers.

    Example:
        >>> from accel_callbacks.data.iterable import IterableShards
        >>> list(IterableShards(range(5), batch_size=2, drop_last=False, rank=1, world_size=2))
        [([2, 3], 4), ([0], 1)]
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        batch_size: int,
        drop_last: bool,
        rank: int,
        world_size: int,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = rank
        self.world_size = world_size
        # In shared memory, so that a loader worker which outlives an epoch sees the next one.
        self._epoch = torch.zeros(1, dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[tuple[list[Any], int]]:
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(int(self._epoch))
        stream = iter(self.dataset)
        size = self.batch_size * self.world_size
        opening: list[Any] = []
        while batch := list(islice(stream, size)):
            opening = opening or batch[: self.world_size]
            if len(batch) < size and self.drop_last:
                return
            each = -(-len(batch) // self.world_size)
            missing = each * self.world_size - len(batch)
            padded = batch + [opening[i % len(opening)] for i in range(missing)]
            yield padded[self.rank * each : (self.rank + 1) * each], len(batch)

    def __len__(self) -> int:
        """Samples of the whole stream; TypeError if it does not know."""
        return len(self.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """The dataset is told with its next pass, if it has a ``set_epoch``."""
        self._epoch.fill_(epoch)


class CollateShare:
    """Collate the samples of a share with the user's function and keep the count.

    Example:
        >>> from accel_callbacks.data.iterable import CollateShare
        >>> CollateShare(sum)(([1, 2], 4))
        (3, 4)
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, item: tuple[list[Any], int]) -> tuple[Any, int]:
        """Collate the samples, pass the count on."""
        samples, real = item
        return self.collate_fn(samples), real
