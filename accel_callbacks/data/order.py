"""The order of samples as a pure function of (seed, epoch)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from accel_callbacks.data.sampler import SeedableRandomSampler

__all__ = ["epoch_order", "mix_seed"]

_MASK = (1 << 64) - 1


def mix_seed(*numbers: int) -> int:
    """One well-spread 63-bit seed from several small numbers (splitmix64, chained).

    Example:
        >>> from accel_callbacks.data.order import mix_seed
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


def epoch_order(sampler: Iterable[Any], seed: int, epoch: int) -> Sequence[Any]:
    """All that a sampler (or batch sampler) yields in this epoch, the same on every process.

    The sampler runs with every random generator it may draw from seeded by (seed, epoch), and
    the generators of the program are put back as they were. A
    :class:`accel_callbacks.SeedableRandomSampler` is asked for its own order of this seed.

    Args:
        sampler: any finite sampler; one with ``set_epoch`` is told the epoch.
        seed: the seed of the run's data order.
        epoch: index of the pass over the data, from 0.

    Example:
        >>> from torch.utils.data import RandomSampler
        >>> from accel_callbacks.data.order import epoch_order
        >>> sampler = RandomSampler(range(5))
        >>> epoch_order(sampler, 7, 0) == epoch_order(sampler, 7, 0)
        True
        >>> epoch_order(sampler, 7, 0) == epoch_order(sampler, 7, 1)
        False
    """
    if type(sampler) is torch.utils.data.SequentialSampler:
        return range(len(sampler))
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.order(seed, epoch)
    mixed = mix_seed(seed, epoch)
    own = _generators_of(sampler)
    before = [generator.get_state() for generator in own]
    try:
        with _seeded(mixed):
            for generator in own:
                generator.manual_seed(mixed)
            for owner in _with_inner(sampler):
                _tell(owner, seed, epoch)
            return list(sampler)
    finally:
        for generator, state in zip(own, before, strict=True):
            generator.set_state(state)


def _with_inner(sampler: Any) -> tuple[Any, Any]:
    """A batch sampler (say), and the sampler inside it."""
    return sampler, getattr(sampler, "sampler", None)


def _tell(sampler: Any, seed: int, epoch: int) -> None:
    """The epoch, to a sampler that wants to know, and the seed to one that has its own."""
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = seed
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _generators_of(sampler: Any) -> list[torch.Generator]:
    """The generators of a sampler and of the sampler inside it."""
    found = (getattr(owner, "generator", None) for owner in _with_inner(sampler))
    return [generator for generator in found if isinstance(generator, torch.Generator)]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators of Python, torch and (where it is loaded) NumPy for a block."""
    python_state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
