"""Seeded sampler orders, and the batch sampler of one rank for loaders built by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

__all__ = [
    "BatchSamplerShard",
    "SeedableRandomSampler",
    "call_set_epoch",
    "mix_seed",
    "set_seed_and_epoch",
    "with_inner",
]

_MASK = (1 << 64) - 1


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler with the order of ``torch.randperm``, seeded with its seed plus the epoch.

    Each pass is the next epoch, unless :meth:`set_epoch` is called. No generator of the program
    is drawn from. The orders are those of the class of this name in Hugging Face Accelerate.

    Args:
        data_source: the dataset to sample from.
        replacement: draw with replacement; off by default.
        num_samples: samples of an epoch, all by default.
        generator: its initial seed is the seed if ``data_seed`` is ``None``; it is not changed.
        data_seed: the seed; torch's (``torch.manual_seed``) if there is no other.

    Raises:
        ValueError: ``num_samples`` is not positive.

    Example:
        >>> from accel_callbacks import SeedableRandomSampler
        >>> sampler = SeedableRandomSampler(range(6), data_seed=5)
        >>> list(sampler)
        [5, 0, 1, 3, 4, 2]
        >>> sampler.epoch
        1
    """

    def __init__(
        self,
        data_source: Any,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, torch.Generator(device="cpu"))
        seeded = torch.default_generator if generator is None else generator
        self.initial_seed = seeded.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        yield from self.order(self.initial_seed, epoch)
        if self.epoch == epoch:  # else set_epoch was called in the middle of the pass
            self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's order in the next pass."""
        self.epoch = epoch

    def order(self, seed: int, epoch: int) -> list[int]:
        """Return the order of an epoch, a function of the seed and the epoch alone."""
        assert isinstance(self.generator, torch.Generator)
        self.generator.manual_seed(seed + epoch)
        with torch.device("cpu"):  # torch.randperm would follow the default device
            return list(super().__iter__())


class BatchSamplerShard(BatchSampler):
    """The batches of one rank, from a batch sampler that is the same on all ranks.

    Rank r takes batches r, r + num_processes, ... or, with ``split_batches``, the r-th slice of
    each batch. It is for loaders that are built by hand; ``prepare`` needs no such wrapper.

    Args:
        batch_sampler: yields lists of indices, in the same order on all ranks. One without
            ``batch_size`` may yield batches of any size.
        num_processes: number of processes that share it.
        process_index: index of this process among them.
        split_batches: slice each batch; its ``batch_size`` must be a multiple of
            ``num_processes``.
        even_batches: fill the last step up with samples (without a ``batch_size``, batches) from
            the start, so that all ranks get equally many batches of equal size. If False, some
            ranks get fewer.

    Raises:
        ValueError: ``split_batches`` with a batch size that cannot be split.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> from accel_callbacks import BatchSamplerShard
        >>> batches = BatchSampler(range(5), batch_size=2, drop_last=False)
        >>> [list(BatchSamplerShard(batches, 2, rank)) for rank in range(2)]
        [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        size = getattr(batch_sampler, "batch_size", None)
        if split_batches and (size is None or size % num_processes):
            raise ValueError(
                f"split_batches=True splits each batch over {num_processes} processes, but the "
                f"batch sampler's batch_size is {size}: give it a round multiple of "
                f"{num_processes}."
            )
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = size  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", batch_sampler)

    @property
    def total_length(self) -> int:
        """Batches of all ranks."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batch sampler and of its sampler, if they have ``set_epoch``."""
        for sampler in (self.batch_sampler, self.sampler):
            call_set_epoch(sampler, epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        per_step = 1 if self.split_batches else self.num_processes
        opening: list[list[Any]] = []
        batches = iter(self.batch_sampler)
        while group := list(islice(batches, per_step)):
            opening = opening or group
            piece = self._piece(group, opening)
            if piece:
                yield list(piece)

    def _piece(self, group: list[list[Any]], opening: list[list[Any]]) -> Sequence[Any]:
        """Return this rank's part of the batches of one step, empty if it has none."""
        rank, size, world = self.process_index, self.batch_size, self.num_processes
        whole = len(group) == (1 if self.split_batches else world)
        full = whole and (size is None or all(len(batch) == size for batch in group))
        if not full and self.drop_last:
            return []
        if size is None:
            group = (
                list(islice(chain(group, cycle(opening)), world)) if self.even_batches else group
            )
            return group[rank] if rank < len(group) else []
        each = size // world if self.split_batches else size
        samples = list(chain(*group))
        if self.even_batches:
            samples = list(islice(chain(samples, cycle(chain(*opening))), each * world))
        return samples[rank * each : (rank + 1) * each]

    def __len__(self) -> int:
        """Batches of this rank."""
        per_step = 1 if self.split_batches else self.num_processes
        full, more = divmod(len(self.batch_sampler), per_step)
        if self.even_batches and not self.drop_last:
            return full + (more > 0)
        if self.drop_last:
            return full
        if not self.split_batches:
            return full + (self.process_index < more)
        tail = self._tail()
        return full - (0 < tail <= self.process_index * (self.batch_size // self.num_processes))

    def _tail(self) -> int:
        """Return the number of samples after the full batches, 0 if the sampler has no length."""
        try:
            return len(self.sampler) % self.batch_size  # type: ignore[arg-type]
        except TypeError:
            return 0


def mix_seed(*numbers: int) -> int:
    """Return one well-spread 63-bit seed for several small numbers (splitmix64, chained).

    Example:
        >>> from accel_callbacks.data.sampler import mix_seed
        >>> mix_seed(0, 1) != mix_seed(1, 0)
        True
    """
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def with_inner(sampler: Any) -> tuple[Any, Any]:
    """Return the sampler and the sampler inside it, as a batch sampler has one."""
    return sampler, getattr(sampler, "sampler", None)


def set_seed_and_epoch(sampler: Any, seed: int, epoch: int) -> None:
    """Set the seed and the epoch of a :class:`SeedableRandomSampler`; do nothing to another one."""
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = seed
        sampler.set_epoch(epoch)


def call_set_epoch(target: Any, epoch: int) -> bool:
    """Call ``set_epoch`` of a sampler or dataset; return whether it has one."""
    set_epoch = getattr(target, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    return callable(set_epoch)
