"""One process's samples of an iterable dataset, for use without a prepared loader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from torch.utils.data import IterableDataset

from accel_callbacks.data.iterable import set_dataset_epoch
from accel_callbacks.data.shard import split_evenly

__all__ = ["IterableDatasetShard"]


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process, one by one; every process iterates the whole dataset.

    ``Accelerator.prepare`` needs none of it: it is for loaders that are put together by hand.

    Args:
        dataset: any iterable; told the epoch by ``set_epoch``, or else its ``generator`` is
            seeded with the epoch.
        batch_size: samples of a batch of one process, or with ``split_batches`` of all together.
        drop_last: leave out what does not fill a batch on all processes.
        num_processes: how many processes share the dataset.
        process_index: which of them this is.
        split_batches: see ``batch_size``.
        even_batches: fill the last batch up with the first samples. Off, its samples are split as
            evenly as it goes, and none is yielded twice.

    Raises:
        ValueError: ``split_batches``, and the batch size is no multiple of ``num_processes``.

    Example:
        >>> from accel_callbacks.data.dataset_shard import IterableDatasetShard
        >>> list(IterableDatasetShard(range(7), 2, num_processes=2, process_index=1))
        [2, 3, 6, 0]
        >>> [*IterableDatasetShard(range(7), 2, num_processes=2, even_batches=False)]
        [0, 1, 4, 5]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        if split_batches and batch_size % num_processes:
            raise ValueError(
                f"split_batches=True splits a batch of {batch_size} over {num_processes} "
                f"processes: make batch_size a multiple of {num_processes}."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.epoch = 0

    @property
    def _size(self) -> int:
        """Samples of a batch of all processes."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass."""
        self.epoch = epoch
        set_dataset_epoch(self.dataset, epoch, epoch)

    def __len__(self) -> int:
        """Samples of this process; TypeError where the dataset has no length."""
        full, tail = divmod(len(self.dataset), self._size)
        return full * self._share(self._size) + (0 if self.drop_last else self._share(tail))

    def _share(self, samples: int) -> int:
        """How many of a batch of so many samples this process yields."""
        if samples and self.even_batches:
            samples = self._size
        return len(split_evenly(range(samples), self.process_index, self.num_processes))

    def __iter__(self) -> Iterator[Any]:
        set_dataset_epoch(self.dataset, self.epoch, self.epoch)
        stream = iter(self.dataset)
        opening: list[Any] = []
        while batch := list(islice(stream, self._size)):
            opening = opening or batch
            if len(batch) < self._size:
                if self.drop_last:
                    return
                if self.even_batches:
                    batch += islice(cycle(list(opening)), self._size - len(batch))
            yield from split_evenly(batch, self.process_index, self.num_processes)
