"""Where a prepared loader's batches come from: a plan over a sampler's order, or a stream."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from accel_callbacks.data.iterable import CollateShare, IterableShards
from accel_callbacks.data.order import epoch_order, mix_seed
from accel_callbacks.data.plan import Plan, SamplePlan, Share

__all__ = ["Progress", "ShareSource", "Source", "StreamSource"]


class Progress(Protocol):
    """The counts of a loader, kept by its source batch by batch."""

    position: int
    real: int
    padded: int
    left: int | None
    on_last: bool


class Source(Protocol):
    """What a prepared loader reads from."""

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch, ``None`` where batches vary."""

    def loader_options(self) -> dict[str, Any]:
        """The arguments that make a torch loader read from this source."""

    def steps(self) -> int:
        """Batches of a whole epoch; TypeError if that cannot be known."""

    def begin(self, seed: int, epoch: int, position: int) -> None:
        """Get ready to read this epoch from this position."""

    def remaining(self) -> int | None:
        """Batches left in the epoch that was begun, ``None`` if unknown."""

    def begun(self) -> int:
        """Batches of this epoch before the position that was begun at."""

    def worker_seed(self, seed: int, epoch: int, position: int) -> int:
        """What the random generators of loader workers are seeded with."""

    def deliver(self, items: Iterator[Any], progress: Progress) -> Iterator[Any]:
        """Pass the torch loader's items on, keeping the counts."""


class ShareSource:
    """The batches of a map-style dataset, through a plan over the sampler's order."""

    def __init__(self, loader: DataLoader[Any], plan: Plan, sampler: Any, batched: bool) -> None:
        self._loader = loader
        self._plan = plan
        self._sampler = sampler
        self._batched = batched
        self._shares: deque[Share] = deque()
        self._order: Any = ()
        self._position = 0

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch."""
        plan = self._plan
        return plan.batch_size * plan.world_size if isinstance(plan, SamplePlan) else None

    def loader_options(self) -> dict[str, Any]:
        """The arguments that make a torch loader read from this source."""
        options: dict[str, Any] = {"dataset": self._loader.dataset}
        if self._batched:
            return options | {"batch_sampler": self, "collate_fn": self._loader.collate_fn}
        sampler = options | {"sampler": self, "batch_size": None}
        return sampler | {"collate_fn": self._loader.collate_fn}

    def steps(self) -> int:
        """Batches of a whole epoch."""
        return self._plan.steps(len(self._sampler))

    def remaining(self) -> int | None:
        """Batches left in the epoch that was begun."""
        return self._plan.remaining(self._order, self._position)

    def begun(self) -> int:
        """Batches of this epoch before the position that was begun at."""
        plan = self._plan
        return plan.steps(len(self._order)) - plan.remaining(self._order, self._position)

    def worker_seed(self, seed: int, epoch: int, position: int) -> int:
        """Other noise on each rank and after each resume."""
        return mix_seed(seed, epoch, position, self._plan.rank)

    def begin(self, seed: int, epoch: int, position: int) -> None:
        """Get the order of this epoch ready."""
        self._order = epoch_order(self._sampler, seed, epoch)
        self._position = position
        self._shares.clear()

    def __iter__(self) -> Iterator[Any]:
        for share in self._plan.shares(self._order, self._position):
            self._shares.append(share)
            yield share.indices if self._batched else share.indices[0]

    def __len__(self) -> int:
        return self.steps()

    def deliver(self, items: Iterator[Any], progress: Progress) -> Iterator[Any]:
        """Pass the batches on, keeping the counts."""
        for item in items:
            # Batches arrive in the order in which their indices were drawn, workers or not.
            share = self._shares.popleft()
            progress.real, progress.padded = share.real, share.padded
            progress.position += share.real
            progress.on_last = progress.left == 1
            yield item


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

    def deliver(self, items: Iterator[Any], progress: Progress) -> Iterator[Any]:
        """Pass the batches on one behind, skipping those before the resumed position."""
        skipped = 0
        ahead: tuple[Any, int] | None = None
        for item in items:
            if skipped < self._position:
                skipped += item[1]
                continue
            if ahead is not None:
                yield self._count(ahead, progress, last=False)
            ahead = item
        if ahead is not None:
            yield self._count(ahead, progress, last=True)

    def _count(self, item: tuple[Any, int], progress: Progress, *, last: bool) -> Any:
        batch, real = item
        world = self._shards.world_size
        progress.real, progress.padded = real, -(-real // world) * world
        progress.position += real
        progress.on_last = last
        return batch
