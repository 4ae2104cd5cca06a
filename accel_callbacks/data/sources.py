"""The interface between a prepared loader and the source that it reads from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accel_callbacks.data.config import DataLoaderConfiguration
from accel_callbacks.data.order import Generators, Record

__all__ = ["Delivery", "Setting", "Source", "State", "check_even", "split_size"]

#: A ``Delivery.state``, from which a pass continues.
State = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """The rank that a source reads for, and the options of the loader.

    Args:
        rank: index of this process among those that read different data.
        world_size: number of processes that read different data.
        config: the options of all loaders.
        slice_fn: the user's ``slice_fn_for_dispatch``, if any.
        copies: number of neighboring processes that read the same data.

    Example:
        >>> from accel_callbacks.data.sources import Setting
        >>> Setting(rank=1, world_size=2).config.even_batches
        True
    """

    rank: int
    world_size: int
    config: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    slice_fn: Callable[..., Any] | None = None
    copies: int = 1


class Delivery(NamedTuple):
    """The counts of one global batch.

    Args:
        real: its samples over all ranks, each counted once.
        padded: its samples as read by all ranks, repetitions included.
        last: True if it is the last of its epoch; ``None`` if the loader counts its batches. Of a
            stream a function, which reads the next batch to find out.
        kept: for each rank, the number of samples at the start of its piece that are no
            repetitions; ``None`` if the repetitions are the last ``padded - real`` samples in rank
            order.
        state: from which a pass continues after this batch, if a position is not enough; or a
            function that returns it.

    Batches that are alike share one, so its functions take the number of the batch, which is 1 for
    the first one that the pass delivers.
    """

    real: int
    padded: int
    last: bool | Callable[[int], bool] | None = None
    kept: Sequence[int] | None = None
    state: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None

    def is_last(self, number: int) -> bool | None:
        """Return whether it is the last, reading on if need be; None if the loader counts."""
        return self.last(number) if callable(self.last) else self.last

    def state_after(self, number: int) -> Mapping[str, Any] | None:
        """Return the state from which a pass continues after this batch."""
        return self.state(number) if callable(self.state) else self.state


class Source(ABC):
    """The source of a prepared loader's batches; the defaults are those of a plain stream."""

    #: Persistent workers of the last pass cannot be used for the current one.
    fresh_workers: bool = False

    # --- sizes --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def even_batches(self) -> bool:
        """Fill the tail up with repetitions; may be set, for the next pass."""

    @even_batches.setter
    @abstractmethod
    def even_batches(self, even: bool) -> None:
        """Set it for the next pass."""

    @property
    @abstractmethod
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch, ``None`` where batches vary."""

    @property
    def remainder(self) -> int:
        """Samples of an epoch over its full global batches; -1 if unknown or dropped."""
        return -1

    @abstractmethod
    def loader_options(self) -> dict[str, Any]:
        """Return the arguments with which a torch loader reads from this source."""

    @abstractmethod
    def steps(self) -> int:
        """Return the batches of an epoch; raise TypeError if they cannot be known."""

    def layout(self) -> dict[str, Any]:
        """Return what the samples of each step of the current pass follow from, as plain values."""
        return {"source": type(self).__name__}

    def remaining(self) -> int | None:
        """Return the batches left in the current epoch, ``None`` if unknown."""
        # A stream may end before its length, so its end is found by reading.
        return None

    @abstractmethod
    def first_batch(self) -> int:
        """Return the index in the epoch of the first batch of this pass."""

    @abstractmethod
    def position_of(self, batches: int) -> int:
        """Return the global samples before this batch of the current epoch (its end at most)."""

    # --- random numbers -----------------------------------------------------------------------

    @property
    @abstractmethod
    def generators(self) -> Generators:
        """The generators that belong to the sampler or to the loader, and are saved with it."""

    @property
    def draws_order(self) -> bool:
        """True if orders are drawn at random by the user's sampler."""
        return False

    @property
    def base_seed_first(self) -> bool:
        """True if a pass from its start first draws the base seed, as in a plain loop."""
        return False

    @property
    def draws_base_seed(self) -> bool:
        """True if torch's loader draws its base seed in the current pass as in a plain loop."""
        return False

    @abstractmethod
    def worker_generator(self, seed: int, epoch: int, position: int) -> torch.Generator:
        """Return what the base seed of workers is drawn from, where it is not as in torch."""

    # --- a pass -------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:  # noqa: B027
        """Call ``set_epoch`` of the user's sampler; a dataset is told as each pass begins."""

    @abstractmethod
    def begin(
        self,
        seed: int,
        epoch: int,
        position: int,
        record: Record | None = None,
        workers_start: bool = True,
    ) -> None:
        """Prepare a pass over this epoch from this position on.

        Args:
            seed: of the loader.
            epoch: index of the pass.
            position: global samples before the first one.
            record: of the pass to be resumed, from :meth:`record`.
            workers_start: torch's loader draws a base seed, for it has no workers from the last
                pass.
        """

    @abstractmethod
    def seek(self, position: int) -> None:
        """Start the pass that was just begun at another position."""

    def finish(self) -> None:  # noqa: B027
        """Draw what the pass that was just begun, and has nothing left, draws at its end."""

    @abstractmethod
    def deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """Yield each batch of the torch loader with its counts."""

    # --- resuming -----------------------------------------------------------------------------

    def record(self) -> Record | None:
        """Return what draws the order of the current pass again, ``None`` if there is no need."""
        return None

    def problem_of(self, record: Record | None) -> str | None:
        """Return why a resume from a record cannot be exact, ``None`` if it is."""
        return None

    def restore(self, state: State | None) -> None:  # noqa: B027
        """Store a ``Delivery.state``, for a pass that starts there or later in that epoch."""

    def problem(self, state: State | None) -> str | None:
        """Return why a resume from this state cannot be exact, ``None`` if it is."""
        return None


def split_size(batch_size: int, parts: int) -> int:
    """Return the batch size of one of the ranks that share a batch.

    Raises:
        ValueError: it cannot be split evenly.

    Example:
        >>> from accel_callbacks.data.sources import split_size
        >>> split_size(8, 2)
        4
    """
    if batch_size % parts:
        raise ValueError(
            f"split_batches=True splits a batch of {batch_size} over {parts} processes: give the "
            f"loader a multiple of {parts} as its batch_size."
        )
    return batch_size // parts


def check_even(even: bool, *, ready: bool) -> None:
    """Raise ValueError for ``even_batches=False`` with ready batches, which cannot be split."""
    if not even and ready:
        raise ValueError(
            "a loader with batch_size=None reads ready batches, which cannot be split: give it a "
            "batch_size, or leave even_batches on."
        )
