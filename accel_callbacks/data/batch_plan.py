"""Which batches of a user's own batch sampler this process reads at each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from accel_callbacks.data.shard import Share, fill_up, refuse_too_few, split_evenly

__all__ = ["BatchPlan"]

Batches = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class BatchPlan:
    """For a custom batch sampler: at step k, process r reads batch ``k * world_size + r``.

    The last step is filled up with batches from the start of the epoch. Positions still count
    samples.

    If not ``even``, the batches over the full steps are split over the processes, and where they
    have fewer samples than there are processes, they and the step before are split together.

    With ``split``, each batch of the sampler is that of all processes, and is split over them;
    samples from the start of the epoch fill it up, unless ``even`` is off.

    Args:
        rank: index of this process.
        world_size: number of processes.
        even: fill the last step up with repetitions.
        split: split each batch over the processes.
        batch_size: of one process, if the sampler says so; its batches may still be smaller.

    Example:
        >>> from accel_callbacks.data.batch_plan import BatchPlan
        >>> plan = BatchPlan(rank=0, world_size=1)
        >>> [share.indices for share in plan.shares([[0], [1, 2]], 1)]
        [[1, 2]]
    """

    rank: int
    world_size: int
    even: bool = True
    split: bool = False
    batch_size: int | None = None

    drop_last = False  # the sampler has left out what it leaves out

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch, if the sampler says how large its batches are."""
        return None if self.batch_size is None else self.batch_size * self.world_size

    @property
    def _at_once(self) -> int:
        """Batches of the sampler in a full step."""
        return 1 if self.split else self.world_size

    def check(self, order: Batches) -> None:
        """Raise ValueError if the processes cannot take the same number of steps."""
        if not self.even:
            refuse_too_few(sum(map(len, order)), self.world_size)

    def steps(self, total: int) -> int | None:
        """Global batches of an epoch of this many batches; ``None`` if their sizes decide."""
        certain = self.even or (not self.split and total % self.world_size == 0)
        return -(-total // self._at_once) if certain else None

    def remaining(self, order: Batches, position: int) -> int:
        """Global batches after ``position`` global samples."""
        return len(self._groups(order, position))

    def position_of(self, order: Batches, step: int) -> int:
        """Global samples before this global batch; all of them for a later one."""
        groups = self._groups(order, 0)
        return sum(len(batch) for group in groups[:step] for batch in group)

    def shares(self, order: Batches, position: int) -> Iterator[Share]:
        """This process's samples in each global batch after ``position`` global samples."""
        for group in self._groups(order, position):
            yield self._share(group, order)

    def _groups(self, order: Batches, position: int) -> list[list[Sequence[Any]]]:
        """The batches of each step."""
        first, count = self._begun(order, position), self._at_once
        groups = [list(order[i : i + count]) for i in range(first, len(order), count)]
        return groups if self.even else self._joined(groups)

    def _joined(self, groups: list[list[Sequence[Any]]]) -> list[list[Sequence[Any]]]:
        """What has no sample for each process goes with what is before (the first, after) it."""
        joined: list[list[Sequence[Any]]] = []
        for group in groups:
            if joined and self.world_size > min(_samples(group), _samples(joined[-1])):
                joined[-1] = joined[-1] + group
            else:
                joined.append(group)
        return joined

    def _share(self, group: list[Sequence[Any]], order: Batches) -> Share:
        world, real = self.world_size, _samples(group)
        if not self.split and len(group) == world:
            return Share(group[self.rank], real, real)
        if self.even and not self.split:
            group = group + [order[extra % len(order)] for extra in range(world - len(group))]
            return Share(group[self.rank], real, _samples(group))
        samples = list(chain(*group))
        if not self.even and real >= world:
            return Share(split_evenly(samples, self.rank, world), real, real)
        opening = list(chain(*order[:world]))
        return Share(fill_up(samples, opening, self.rank, world), real, -(-real // world) * world)

    def _begun(self, order: Batches, position: int) -> int:
        """The sampler's batches that lie whole before ``position``."""
        first = seen = 0
        while first < len(order) and seen + len(order[first]) <= position:
            seen += len(order[first])
            first += 1
        return first


def _samples(group: Sequence[Sequence[Any]]) -> int:
    return sum(map(len, group))
