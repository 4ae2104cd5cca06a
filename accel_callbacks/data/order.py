"""The order of a pass: drawn by the user's sampler, and recorded to be drawn again by a resume."""

from __future__ import annotations

import random
import sys
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_callbacks.data.generators import GLOBAL, Generators
from accel_callbacks.data.sampler import (
    SeedableRandomSampler,
    call_set_epoch,
    mix_seed,
    set_seed_and_epoch,
    with_inner,
)

__all__ = [
    "Draws",
    "Record",
    "draws_again",
    "draws_at_random",
    "epoch_order",
    "length_of",
    "own_generators",
]

#: What :class:`Draws` needs to draw the items of a pass again: a tree of plain values.
Record = Mapping[str, Any]

# Samplers without state of their own: they draw from their generator, or from a private one that is
# seeded with one draw from torch's global generator.
_DRAW_ONCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DRAW_NOTHING = (SequentialSampler, SeedableRandomSampler, range, list, tuple)
# Foreign draws between those of a sampler are recorded so many times in a pass.
_MOST_ENTRIES = 512
# After so many batches, the generators that the sampler has not drawn from are not looked at.
_WATCHED = 16


def length_of(sampler: Any) -> int | None:
    """Return what a sampler says of its length, None if it says nothing."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def epoch_order(sampler: Iterable[Any], seed: int, epoch: int) -> Sequence[Any]:
    """Return all that a sampler (or batch sampler) yields in an epoch, the same on every rank.

    While the sampler runs, every random generator that it may draw from is seeded with
    (seed, epoch); the program's generators are restored afterwards. The order of a
    :class:`accel_callbacks.SeedableRandomSampler` is its own for this seed.

    Args:
        sampler: any finite sampler; its ``set_epoch`` is called if it has one.
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
    owners = with_inner(sampler)
    attributes = (getattr(owner, "generator", None) for owner in owners)
    seeded = [generator for generator in attributes if isinstance(generator, torch.Generator)]
    with Generators(GLOBAL, seeded).preserve():
        for generator in (torch.default_generator, *seeded):
            generator.manual_seed(mixed)
        random.seed(mixed)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(mixed % (1 << 32))
        for owner in owners:
            set_seed_and_epoch(owner, seed, epoch)
            call_set_epoch(owner, epoch)
        return list(sampler)


class _Sources(NamedTuple):
    """What a sampler draws from, and when.

    Args:
        kinds: the global generators.
        private: the sampler's own generators.
        watched: it may draw again in the middle of a pass, or has state of its own.
    """

    kinds: Sequence[str]
    private: list[Any]
    watched: bool


def _sources_of(sampler: Any) -> _Sources:
    kind = type(sampler)
    if kind is BatchSampler:
        return _sources_of(sampler.sampler)
    if kind in _DRAW_NOTHING:
        return _Sources((), [], False)
    if kind in _DRAW_ONCE:
        if sampler.generator is None:
            return _Sources(("torch",), [], False)
        # It draws in the middle of a pass then: 32 at a time, or one permutation after another.
        again = kind is RandomSampler and (
            sampler.replacement or sampler.num_samples > len(sampler.data_source)
        )
        return _Sources((), [sampler.generator], again)
    return _Sources(GLOBAL, _generators_in(sampler), True)


def _generators_in(sampler: Any, depth: int = 3) -> list[Any]:
    """Return the generators among the attributes of a sampler, and of samplers inside of it."""
    generators: list[Any] = []
    for value in getattr(sampler, "__dict__", {}).values():
        inner = isinstance(value, Sampler) and depth
        for generator in _generators_in(value, depth - 1) if inner else [value]:
            known = any(generator is held for held in generators)
            if _is_generator(generator) and not known:
                generators.append(generator)
    return generators


def _is_generator(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    numpy: Any = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds)


class Draws:
    """One pass over a sampler (or batch sampler), which records what the sampler draws from.

    The record holds the state of the generators at the start; and, for a sampler that draws again
    later, at each of its draws before which something else had drawn. With it the same items are
    drawn again.

    Args:
        sampler: any iterable of indices or of batches.
        record: of the pass to be drawn again.
        loader_generator: the generator of the loader; part of :attr:`generators`.

    Attributes:
        drawn: number of items drawn.
        differs: the items drawn again are not those of the record.

    Example:
        >>> import torch
        >>> from torch.utils.data import RandomSampler
        >>> from accel_callbacks.data.order import Draws
        >>> draws = Draws(RandomSampler(range(5)))
        >>> first = draws.take(3)
        >>> again = Draws(RandomSampler(range(5)), draws.record())
        >>> again.take(3) == first, again.take(9) == draws.take(9)
        (True, True)
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        record: Record | None = None,
        loader_generator: torch.Generator | None = None,
    ) -> None:
        sources = _sources_of(sampler)
        self.generators = Generators(
            sources.kinds, _with_loaders(sources.private, loader_generator)
        )
        self.watched = sources.watched
        self.draws = bool(sources.kinds or sources.private)
        self.drawn = 0
        self.differs = False
        self._sampler = sampler
        self._iterator: Iterator[Any] | None = None
        self._entries: list[tuple[int, Mapping[str, Any]]] = []
        self._noted = 0
        self._left_alone = {"python", "numpy"}  # not drawn from in this pass, but at its start
        self._unwatched: Collection[str] = ()
        self._last: dict[str, Any] | None = None  # after the sampler's last draw
        self._digest = 0
        self._ended = False
        self._ahead: deque[Any] = deque()
        if record is not None:
            self._draw_again(record)

    @property
    def is_open(self) -> bool:
        """True once the sampler's ``__iter__`` was called."""
        return self._iterator is not None

    @property
    def held(self) -> Sequence[Any]:
        """The items that were drawn again and not taken yet."""
        return list(self._ahead)

    @property
    def digest(self) -> int | None:
        """A checksum of the items drawn, None for a sampler that needs none."""
        return self._digest if self.watched else None

    def record(self) -> Record:
        """Return what is needed to draw the same items again."""
        entries = [[place, dict(state)] for place, state in self._entries]
        return {
            "drawn": self.drawn,
            "ended": self._ended,
            "entries": entries,
            "digest": self.digest,
        }

    def open(self) -> None:
        """Call the sampler's ``__iter__``; anew, if it was called and nothing was drawn.

        With workers, torch's loader calls it twice: before and after it draws its base seed.
        """
        if self.drawn:
            return
        if self.draws:
            # Captured before __iter__, where some samplers shuffle.
            self._last = self.generators.capture()
            self._entries = [(0, self._last)]
        self._iterator = iter(self._sampler)

    def take(self, count: int | None) -> list[Any]:
        """Return the next items, all that are left for None; fewer at the end."""
        items: list[Any] = []
        while self._ahead and (count is None or len(items) < count):
            items.append(self._ahead.popleft())
        if count is None or len(items) < count:
            items += self._draw(None if count is None else count - len(items))
        return items

    def _draw(self, count: int | None) -> list[Any]:
        if self._ended:
            return []
        if self._iterator is None:
            self.open()
        assert self._iterator is not None
        before = self.generators.capture(self._unwatched) if self.watched else None
        place = self.drawn
        items = list(islice(self._iterator, count))
        self.drawn += len(items)
        # RandomSampler draws once more at its end, which a resume must not repeat.
        self._ended = self._ended or count is None or len(items) < count
        if before is not None:
            self._note(place, before)
            for item in items:
                self._digest = zlib.crc32(repr(item).encode(), self._digest)
        return items

    def _note(self, place: int, before: dict[str, Any]) -> None:
        """Record the state before a draw, if something else has drawn since the last one."""
        after = self.generators.capture(self._unwatched)
        # To read the states of Python and NumPy costs more than a batch should. The first draw of a
        # pass, a shuffle, does not count.
        if place and self._noted < _WATCHED:
            self._left_alone &= {name for name in before if before[name] == after[name]}
        self._noted += 1
        if self._noted == _WATCHED:
            self._unwatched = frozenset(self._left_alone)
        foreign = before != self._last and before != after
        if foreign and len(self._entries) < _MOST_ENTRIES:
            self._entries.append((place, before))
        if before != after or self._last is None:
            self._last = after

    def _draw_again(self, record: Record) -> None:
        """Draw the items of a record, and hold them; the generators are as before afterwards."""
        now = self.generators.capture()
        try:
            for place, state in record["entries"]:
                if place > self.drawn:
                    self._ahead.extend(self._draw(place - self.drawn))
                self.generators.restore(state)
                self._last = None
                self.open()
            left = record["drawn"] - self.drawn
            # To ask for one more than there was notes the end, which the saved pass had reached.
            self._ahead.extend(self._draw(left + 1 if record["ended"] else left))
        finally:
            # These draws were made before the checkpoint, whose state of the generators is `now`.
            self.generators.restore(now)
        self._entries = [(place, state) for place, state in record["entries"]]
        self._last = None
        known = record["digest"]
        self.differs = self.drawn != record["drawn"] or (
            self.watched and known is not None and known != self._digest
        )


def draws_at_random(sampler: Any) -> bool:
    """Return whether a sampler may draw from a generator."""
    sources = _sources_of(sampler)
    return bool(sources.kinds or sources.private)


def draws_again(sampler: Any) -> bool:
    """Return whether a sampler may draw other than once, when its first item is asked for."""
    return _sources_of(sampler).watched


def own_generators(sampler: Any, loader_generator: torch.Generator | None) -> Generators:
    """Return the generators that belong to a sampler or to its loader."""
    return Generators((), _with_loaders(_sources_of(sampler).private, loader_generator))


def _with_loaders(generators: list[Any], generator: torch.Generator | None) -> list[Any]:
    """Return a sampler's generators and that of its loader, each once."""
    if generator is None or any(held is generator for held in generators):
        return generators
    return [*generators, generator]
