"""Which samples this process reads at each step of an epoch, from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

__all__ = ["Plan", "SamplePlan", "Share", "fill_up", "refuse_too_few", "split_evenly"]


class Share(NamedTuple):
    """The part of one global batch that this process reads.

    Args:
        indices: what this process reads, padding included; the same length on all processes
            (for a batch sampler or without padding, they may differ).
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

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch, ``None`` where batches vary."""

    @property
    def drop_last(self) -> bool:
        """Whether the samples over the full batches are left out."""

    def check(self, order: Sequence[Any]) -> None:
        """Raise ValueError if the processes cannot take the same number of steps."""

    def shares(self, order: Sequence[Any], position: int) -> Iterator[Share]:
        """This process's share of each global batch after ``position`` global samples."""

    def steps(self, total: int) -> int | None:
        """Global batches of an order of this length; ``None`` if only the order itself tells."""

    def remaining(self, order: Sequence[Any], position: int) -> int:
        """Global batches after ``position`` global samples."""

    def position_of(self, order: Sequence[Any], step: int) -> int:
        """Global samples before this global batch; all of them for a later one."""


def split_evenly(samples: Sequence[Any], rank: int, world_size: int) -> Sequence[Any]:
    """The contiguous piece of one process; the first ones get one sample more where needed.

    Example:
        >>> from accel_callbacks.data.shard import split_evenly
        >>> [list(split_evenly(range(5), rank, 2)) for rank in range(2)]
        [[0, 1, 2], [3, 4]]
    """
    each, more = divmod(len(samples), world_size)
    first = rank * each + min(rank, more)
    return samples[first : first + each + (rank < more)]


def fill_up(
    samples: Sequence[Any], opening: Sequence[Any], rank: int, world_size: int
) -> Sequence[Any]:
    """The piece of one process, all as long; samples of ``opening`` (of an epoch) fill them up.

    Example:
        >>> from accel_callbacks.data.shard import fill_up
        >>> [fill_up([7, 8, 9], [0, 1], rank, 2) for rank in range(2)]
        [[7, 8], [9, 0]]
    """
    each = -(-len(samples) // world_size)
    piece = list(samples[rank * each : (rank + 1) * each])
    filler = max(rank * each - len(samples), 0)
    while len(piece) < each:
        piece.append(opening[filler % len(opening)])
        filler += 1
    return piece


def refuse_too_few(samples: int, world_size: int) -> None:
    """Without repetitions, each process needs a sample of its own in each step."""
    if 0 < samples < world_size:
        raise ValueError(
            f"the epoch has {samples} samples for {world_size} processes, and with "
            "even_batches=False none is read twice: leave even_batches on for this loader, or "
            "start fewer processes."
        )


@dataclass(frozen=True)
class SamplePlan:
    """Global batch k is the next ``batch_size * world_size`` samples of the order.

    Process r reads the r-th contiguous piece. The last batch of an epoch is split evenly, and
    at most ``world_size - 1`` samples from the start of the epoch fill it up, so that every
    process takes the same number of steps and the repetitions are the last in rank order.

    If not ``even``, nothing fills it up: some processes have one sample more, and a tail of fewer
    samples than processes joins the batch before. Only a resume in that tail, of a run that had
    another number of processes, still fills up: the alternative is to lose it.

    Example:
        >>> from accel_callbacks.data.shard import SamplePlan
        >>> plan = SamplePlan(batch_size=2, drop_last=False, rank=1, world_size=2)
        >>> [list(share.indices) for share in plan.shares(range(7), 0)]
        [[2, 3], [6, 0]]
        >>> plan = SamplePlan(batch_size=2, drop_last=False, rank=1, world_size=2, even=False)
        >>> [list(share.indices) for share in plan.shares(range(9), 0)]
        [[2, 3], [7, 8]]
    """

    batch_size: int
    drop_last: bool
    rank: int
    world_size: int
    even: bool = True

    @property
    def total_batch_size(self) -> int:
        """Samples of a full global batch."""
        return self.batch_size * self.world_size

    def check(self, order: Sequence[Any]) -> None:
        """Raise ValueError if the processes cannot take the same number of steps."""
        if not self.even and not self.drop_last:
            refuse_too_few(len(order), self.world_size)

    def _layout(self, samples: int) -> tuple[int, int]:
        """(full batches, size of another one after them or 0) for this many samples."""
        full, tail = divmod(samples, self.total_batch_size)
        if self.drop_last:
            return full, 0
        if self.even or not full or not 0 < tail < self.world_size:
            return full, tail
        return full - 1, self.total_batch_size + tail

    def steps(self, total: int) -> int:
        """Global batches of a whole epoch, for an order of this length."""
        full, tail = self._layout(total)
        return full + (tail > 0)

    def remaining(self, order: Sequence[Any], position: int) -> int:
        """Global batches after ``position`` global samples."""
        return self.steps(max(len(order) - position, 0))

    def position_of(self, order: Sequence[Any], step: int) -> int:
        """Global samples before this global batch; all of them for a later one."""
        full, tail = self._layout(len(order))
        if step > full:
            return full * self.total_batch_size + tail
        return step * self.total_batch_size

    def shares(self, order: Sequence[Any], position: int) -> Iterator[Share]:
        """This process's share of each global batch after ``position`` global samples."""
        full, tail = self._layout(max(len(order) - position, 0))
        size = self.total_batch_size
        for step in range(full):
            first = position + step * size + self.rank * self.batch_size
            yield Share(list(order[first : first + self.batch_size]), size, size)
        if tail:
            start = position + full * size
            yield self._last(order[start : start + tail], order)

    def _last(self, samples: Sequence[Any], order: Sequence[Any]) -> Share:
        real, world = len(samples), self.world_size
        if not self.even and real >= world:
            return Share(list(split_evenly(samples, self.rank, world)), real, real)
        return Share(fill_up(samples, order, self.rank, world), real, -(-real // world) * world)
