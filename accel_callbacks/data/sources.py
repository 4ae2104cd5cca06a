"""What a prepared loader reads from, and what it learns with each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Delivery", "Source"]


@dataclass(frozen=True)
class Delivery:
    """The counts of one global batch.

    Args:
        real: its samples over all processes, each counted once.
        padded: its samples as read by all processes, repetitions included.
        last: whether it is the last of its epoch; ``None`` where the loader's own count says so.
        kept: for each process, how many samples at the start of its piece are no repetitions;
            ``None`` where the repetitions are the last ``padded - real`` samples in rank order.
    """

    real: int
    padded: int
    last: bool | None = None
    kept: Sequence[int] | None = None


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

    def deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """Each batch of the torch loader with its counts."""
