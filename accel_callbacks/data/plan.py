"""Which samples this process reads at each step of an epoch, from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["BatchPlan", "Plan", "SamplePlan", "Share"]


@dataclass(frozen=True)
class Share:
    """The part of one global batch that this process reads.

    Args:
        indices: what this process reads, padding included; the same length on all processes
            (for a batch sampler, the batches it gives may differ).
        real: samples of the global batch, counted once.
        padded: samples that all processes read together; the last ``padded - real`` of them, in
            rank order, are repetitions.
    """

    indices: Sequence[Any]
    real: int
    padded: int


class Plan(Protocol):
    """How the samples of an epoch are spread over steps and processes."""

    @property
    def rank(self) -> int:
        """The process whose shares these are."""

    def shares(self, order: Sequence[Any], position: int) -> Iterator[Share]:
        """This process's share of each global batch after ``position`` global samples."""

    def steps(self, total: int) -> int:
        """Global batches of a whole epoch, for an order of this length."""

    def remaining(self, order: Sequence[Any], position: int) -> int:
        """Global batches after ``position`` global samples."""


@dataclass(frozen=True)
class SamplePlan:
    """Global batch k is the next ``batch_size * world_size`` samples of the order.

    Process r reads the r-th contiguous piece. The last batch of an epoch is split evenly, and
    at most ``world_size - 1`` samples from the start of the epoch fill it up, so that every
    process takes the same number of steps and the repetitions are the last in rank order.

    Example:
        >>> from accel_callbacks.data.plan import SamplePlan
        >>> plan = SamplePlan(batch_size=2, drop_last=False, rank=1, world_size=2)
        >>> [list(share.indices) for share in plan.shares(range(7), 0)]
        [[2, 3], [6, 0]]
    """

    batch_size: int
    drop_last: bool
    rank: int
    world_size: int

    def steps(self, total: int) -> int:
        """Global batches of a whole epoch, for an order of this length."""
        size = self.batch_size * self.world_size
        return total // size if self.drop_last else -(-total // size)

    def remaining(self, order: Sequence[Any], position: int) -> int:
        """Global batches after ``position`` global samples."""
        return self.steps(max(len(order) - position, 0))

    def shares(self, order: Sequence[Any], position: int) -> Iterator[Share]:
        """This process's share of each global batch after ``position`` global samples."""
        total, size = len(order), self.batch_size * self.world_size
        for start in range(position, total, size):
            real = min(size, total - start)
            if real < size and self.drop_last:
                return
            each = -(-real // self.world_size)
            first = start + self.rank * each
            indices = list(order[first : min(first + each, total)])
            filler = first + len(indices) - total
            while len(indices) < each:
                indices.append(order[filler % total])
                filler += 1
            yield Share(indices, real, each * self.world_size)


@dataclass(frozen=True)
class BatchPlan:
    """For a custom batch sampler: at step k, process r reads batch ``k * world_size + r``.

    The last step is filled up with batches from the start of the epoch. Positions still count
    samples.

    Example:
        >>> from accel_callbacks.data.plan import BatchPlan
        >>> plan = BatchPlan(rank=0, world_size=1)
        >>> [share.indices for share in plan.shares([[0], [1, 2]], 1)]
        [[1, 2]]
    """

    rank: int
    world_size: int

    def steps(self, total: int) -> int:
        """Global batches of a whole epoch, for an order of this many batches."""
        return -(-total // self.world_size)

    def remaining(self, order: Sequence[Any], position: int) -> int:
        """Global batches after ``position`` global samples."""
        return self.steps(len(order) - self._begun(order, position))

    def shares(self, order: Sequence[Any], position: int) -> Iterator[Share]:
        """This process's batches after ``position`` global samples."""
        for start in range(self._begun(order, position), len(order), self.world_size):
            batches = list(order[start : start + self.world_size])
            real = sum(len(batch) for batch in batches)
            for extra in range(self.world_size - len(batches)):
                batches.append(order[extra % len(order)])
            padded = sum(len(batch) for batch in batches)
            yield Share(batches[self.rank], real, padded)

    def _begun(self, order: Sequence[Any], position: int) -> int:
        """The sampler's batches that lie whole before ``position``."""
        first = seen = 0
        while first < len(order) and seen + len(order[first]) <= position:
            seen += len(order[first])
            first += 1
        return first
