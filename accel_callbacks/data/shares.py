"""The batches of a map-style dataset: a plan over the order of its sampler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from accel_callbacks.data.order import epoch_order, mix_seed
from accel_callbacks.data.plan import Plan, SamplePlan, Share
from accel_callbacks.data.sources import Delivery

__all__ = ["ShareSource"]


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

    def deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """Each batch of the torch loader with its counts."""
        for item in items:
            # Batches arrive in the order in which their indices were drawn, workers or not.
            share = self._shares.popleft()
            yield item, Delivery(share.real, share.padded)
