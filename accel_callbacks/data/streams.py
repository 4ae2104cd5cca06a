"""The batches of an iterable dataset."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from accel_callbacks.data.iterable import CollateShare, IterableShards
from accel_callbacks.data.order import mix_seed
from accel_callbacks.data.sources import Delivery

__all__ = ["StreamSource"]


class StreamSource:
    """The batches of an iterable dataset; one is read ahead, to know which is the last."""

    def __init__(self, loader: DataLoader[Any], shards: IterableShards) -> None:
        self._loader = loader
        self._shards = shards
        self._position = 0
        self._warned = False

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch."""
        return self._shards.batch_size * self._shards.world_size

    def loader_options(self) -> dict[str, Any]:
        """The arguments that make a torch loader read from this source."""
        collate = CollateShare(self._loader.collate_fn)
        return {"dataset": self._shards, "batch_size": None, "collate_fn": collate}

    def steps(self) -> int:
        """Batches of a whole epoch; TypeError where the dataset has no length."""
        total = len(self._shards)
        size = self._shards.batch_size * self._shards.world_size
        return total // size if self._shards.drop_last else -(-total // size)

    def remaining(self) -> int | None:
        """A stream may end earlier than its length says, so the end is found by reading ahead."""
        return None

    def begun(self) -> int:
        """Batches of this epoch before the position that was begun at."""
        return self._position // (self._shards.batch_size * self._shards.world_size)

    def worker_seed(self, seed: int, epoch: int, position: int) -> int:
        """The same stream on every rank and after a resume."""
        return mix_seed(seed, epoch)

    def begin(self, seed: int, epoch: int, position: int) -> None:
        """Tell the dataset the epoch, and note how much to skip."""
        self._shards.set_epoch(epoch)
        self._position = position
        if position and not self._warned:
            self._warned = True
            warnings.warn(
                f"resuming an iterable dataset reads and drops its first {position} samples; "
                "a map-style dataset resumes at once.",
                stacklevel=2,
            )

    def deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """Each batch with its counts, one behind, skipping those before the resumed position."""
        skipped = 0
        ahead: tuple[Any, int] | None = None
        for item in items:
            if skipped < self._position:
                skipped += item[1]
                continue
            if ahead is not None:
                yield self._counted(ahead, last=False)
            ahead = item
        if ahead is not None:
            yield self._counted(ahead, last=True)

    def _counted(self, item: tuple[Any, int], *, last: bool) -> tuple[Any, Delivery]:
        batch, real = item
        world = self._shards.world_size
        return batch, Delivery(real, -(-real // world) * world, last)
