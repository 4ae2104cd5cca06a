"""What a prepared loader reads from, and what it learns with each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from accel_callbacks.data.config import DataLoaderConfiguration

__all__ = ["Delivery", "Setting", "Source"]


@dataclass(frozen=True)
class Setting:
    """For which process a source reads, and how.

    Args:
        rank: index of this process.
        world_size: number of processes.
        config: the options of all loaders.
        slice_fn: the user's ``slice_fn_for_dispatch``, if there is one.

    Example:
        >>> from accel_callbacks.data.sources import Setting
        >>> Setting(rank=1, world_size=2).config.even_batches
        True
    """

    rank: int
    world_size: int
    config: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    slice_fn: Callable[..., Any] | None = None


class Delivery(NamedTuple):
    """The counts of one global batch.

    Args:
        real: its samples over all processes, each counted once.
        padded: its samples as read by all processes, repetitions included.
        last: whether it is the last of its epoch; ``None`` where the loader's own count says so.
        kept: for each process, how many samples at the start of its piece are no repetitions;
            ``None`` where the repetitions are the last ``padded - real`` samples in rank order.
        state: what leads on from after this batch, where a position is not enough.
    """

    real: int
    padded: int
    last: bool | None = None
    kept: Sequence[int] | None = None
    state: Mapping[str, Any] | None = None


class Source(Protocol):
    """What a prepared loader reads from.

    Attributes:
        even_batches: fill the tail up with repetitions; may be set, for the next pass.
    """

    even_batches: bool

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch, ``None`` where batches vary."""

    @property
    def remainder(self) -> int:
        """Samples of an epoch over its full global batches; -1 if unknown or dropped."""

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

    def position_of(self, batches: int) -> int:
        """Global samples before this batch of the epoch that was begun (of its end, at most)."""

    def worker_seed(self, seed: int, epoch: int, position: int) -> int:
        """What the random generators of loader workers are seeded with."""

    def deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """Each batch of the torch loader with its counts."""
