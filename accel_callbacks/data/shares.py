"""The batches of a map-style dataset: a plan over the order of its sampler."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from accel_callbacks.data.batch_plan import BatchPlan
from accel_callbacks.data.order import epoch_order, mix_seed
from accel_callbacks.data.shard import SamplePlan, Share
from accel_callbacks.data.sources import Delivery

__all__ = ["ShareSource"]


class ShareSource:
    """The batches of a map-style dataset, through a plan over the sampler's order.

    It is the ``batch_sampler`` of the prepared loader (its ``sampler`` where ``batch_size=None``).

    Attributes:
        batch_size: of one process, as far as it is known.
        drop_last: as the loader was given it.
        sampler: what the order comes from; may be replaced, for the next pass.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: SamplePlan | BatchPlan, sampler: Any, batched: bool
    ) -> None:
        self._loader = loader
        self._plan = self._current = plan
        self.sampler = sampler
        self._batched = batched
        total = plan.total_batch_size
        self.batch_size = None if total is None else total // plan.world_size
        self.drop_last = plan.drop_last
        self._shares: deque[Share] = deque()
        self._order: Any = None
        self._position = 0

    @property
    def even_batches(self) -> bool:
        """Fill the tail up with repetitions, from the next pass on."""
        return self._plan.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        if not even and not self._batched:
            raise ValueError(
                "a loader with batch_size=None reads ready batches, which cannot be split: give "
                "it a batch_size, or leave even_batches on."
            )
        self._plan = replace(self._plan, even=even)

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch."""
        return self._plan.total_batch_size

    @property
    def remainder(self) -> int:
        """Samples of an epoch over its full global batches; -1 if unknown or dropped."""
        size = self.total_batch_size
        if size is None or self.drop_last or isinstance(self._plan, BatchPlan):
            return -1
        try:
            return len(self.sampler) % size
        except TypeError:
            return -1

    def loader_options(self) -> dict[str, Any]:
        """The arguments that make a torch loader read from this source."""
        options: dict[str, Any] = {"dataset": self._loader.dataset}
        options["collate_fn"] = self._loader.collate_fn
        if self._batched:
            return options | {"batch_sampler": self}
        return options | {"sampler": self, "batch_size": None}

    def steps(self) -> int:
        """Batches of a whole epoch; where their sizes decide, of the epoch begun last."""
        steps = self._plan.steps(len(self.sampler))
        if steps is None:
            order = epoch_order(self.sampler, 0, 0) if self._order is None else self._order
            steps = self._plan.remaining(order, 0)
        return steps

    def remaining(self) -> int:
        """Batches left in the epoch that was begun."""
        return self._current.remaining(self._order, self._position)

    def begun(self) -> int:
        """Batches of this epoch before the position that was begun at."""
        return self._current.remaining(self._order, 0) - self.remaining()

    def position_of(self, batches: int) -> int:
        """Global samples before this batch of the epoch that was begun (of its end, at most)."""
        return self._current.position_of(self._order, batches)

    def worker_seed(self, seed: int, epoch: int, position: int) -> int:
        """Other noise on each rank and after each resume."""
        return mix_seed(seed, epoch, position, self._plan.rank)

    def begin(self, seed: int, epoch: int, position: int) -> None:
        """Get the order of this epoch ready."""
        self._order = epoch_order(self.sampler, seed, epoch)
        self._current = self._plan
        self._current.check(self._order)
        self._position = position
        self._shares.clear()

    def __iter__(self) -> Iterator[Any]:
        for share in self._current.shares(self._order, self._position):
            self._shares.append(share)
            yield share.indices if self._batched else share.indices[0]

    def __len__(self) -> int:
        return self.steps()

    def deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """Each batch of the torch loader with its counts."""
        whole = Delivery(0, 0)
        for item in items:
            # Batches arrive in the order in which their indices were drawn, workers or not.
            _, real, padded = share = self._shares.popleft()
            if real != padded:
                yield item, Delivery(real, padded, kept=self._kept(share))
                continue
            if real != whole.real:  # one serves for all full batches
                whole = Delivery(real, padded)
            yield item, whole

    def _kept(self, share: Share) -> list[int] | None:
        """Ready batches are repeated as a whole, and nobody knows how many samples they have."""
        if self._batched:
            return None
        return [sys.maxsize if rank < share.real else 0 for rank in range(share.padded)]
