"""The order of a pass: drawn by the user's sampler, and recorded to be drawn again by a resume.

A record has the states of the random generators that the sampler draws from, as plain values.
"""

from __future__ import annotations

import random
import sys
import zlib
from array import array
from binascii import a2b_base64, b2a_base64
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from accel_callbacks.data.sampler import (
    SeedableRandomSampler,
    call_set_epoch,
    mix_seed,
    set_seed_and_epoch,
    with_inner,
)

__all__ = [
    "GLOBAL",
    "Draws",
    "Generators",
    "Record",
    "base_seed_generator",
    "draw_base_seed",
    "draws_again",
    "draws_at_random",
    "epoch_order",
    "length_of",
    "own_generators",
    "packed_state",
    "seeded_generator",
    "set_packed_state",
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


# --- the generators that a sampler may draw from --------------------------------------------

#: A state of :class:`Generators`: a tree of plain values.
_State = Mapping[str, Any]
#: The global generators.
GLOBAL = ("torch", "python", "numpy")


class Generators:
    """The random generators that a sampler may draw from.

    Args:
        kinds: those of the global ones, of ``"torch"``, ``"python"`` and ``"numpy"``.
        private: the sampler's own, of torch, Python or NumPy.

    Example:
        >>> import random
        >>> from accel_callbacks.data.order import Generators
        >>> generators = Generators(["python"], [])
        >>> state = generators.capture()
        >>> first = random.random()
        >>> generators.restore(state)
        >>> random.random() == first
        True
    """

    def __init__(self, kinds: Sequence[str], private: Sequence[Any]) -> None:
        self._kinds, self.private = tuple(kinds), list(private)
        self._access: dict[str, _Access] = {}
        for kind in kinds:
            holder = _global_generator(kind)
            if holder is not None:
                self._access[kind] = _access_to(holder)
        for index, holder in enumerate(self.private):
            self._access[f"own{index}"] = _access_to(holder)

    def __reduce__(self) -> tuple[Any, ...]:
        return Generators, (self._kinds, self.private)  # the functions are those of a process

    def __bool__(self) -> bool:
        return bool(self._access)

    def capture(self, without: Collection[str] = ()) -> dict[str, Any]:
        """Return the states as plain values by name, without those of some names."""
        return {name: access.read() for name, access in self._access.items() if name not in without}

    def restore(self, state: _State) -> None:
        """Restore what :meth:`capture` returned; names that are not here are ignored."""
        for name, access in self._access.items():
            if name in state:
                access.restore(state[name])

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Restore the states of before at the end of a block."""
        before = self.capture()
        try:
            yield
        finally:
            self.restore(before)


def _global_generator(kind: str) -> Any:
    """Return what holds a global generator, None for NumPy where it is not imported."""
    if kind == "torch":
        return torch.default_generator
    return random if kind == "python" else getattr(sys.modules.get("numpy"), "random", None)


class _Access(NamedTuple):
    """The functions that read the state of a generator as plain values, and restore it."""

    read: Callable[[], Any]
    restore: Callable[[Any], None]


def _access_to(holder: Any) -> _Access:
    if isinstance(holder, torch.Generator):
        return _Access(
            lambda: packed_state(holder),
            lambda state: set_packed_state(holder, state),
        )
    if holder is random or isinstance(holder, random.Random):
        return _Access(
            lambda: _pack(holder.getstate()),
            lambda state: holder.setstate(_unpack(state)),
        )
    if hasattr(getattr(holder, "bit_generator", None), "state"):  # numpy.random.Generator
        return _Access(
            lambda: _without_arrays(holder.bit_generator.state),
            lambda state: setattr(holder.bit_generator, "state", _with_arrays(state)),
        )
    return _Access(
        lambda: _without_arrays(holder.get_state(legacy=False)),
        lambda state: holder.set_state(_with_arrays(state)),
    )


def packed_state(generator: torch.Generator) -> str:
    """Return the state of a generator as text, as all states here: a loader's state is plain JSON.

    Example:
        >>> import torch
        >>> from accel_callbacks.data.order import packed_state, set_packed_state
        >>> state = packed_state(torch.Generator().manual_seed(3))
        >>> generator = torch.Generator()
        >>> set_packed_state(generator, state)
        >>> generator.initial_seed()
        3
    """
    return _text(generator.get_state().numpy().tobytes())


def set_packed_state(generator: torch.Generator, state: str) -> None:
    """Set the state of a generator to what :func:`packed_state` returned."""
    generator.set_state(torch.frombuffer(bytearray(a2b_base64(state)), dtype=torch.uint8))


def _text(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode("ascii")


def _pack(state: tuple[Any, ...]) -> list[Any]:
    version, words, gauss = state
    return [version, _text(array("I", words).tobytes()), gauss]


def _unpack(state: Sequence[Any]) -> tuple[Any, ...]:
    version, words, gauss = state
    numbers = array("I")
    numbers.frombytes(a2b_base64(words))
    return version, tuple(numbers), gauss


def _without_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of NumPy with text for arrays, which can be compared."""
    packed: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            packed[name] = _without_arrays(value)
        elif hasattr(value, "tobytes") and hasattr(value, "shape") and value.shape:
            packed[name] = {"dtype": value.dtype.str, "data": _text(value.tobytes())}
        else:
            packed[name] = value.item() if hasattr(value, "item") else value
    return packed


def _with_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    unpacked: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping) and value.keys() == {"dtype", "data"}:
            unpacked[name] = np.frombuffer(a2b_base64(value["data"]), dtype=value["dtype"]).copy()
        else:
            unpacked[name] = _with_arrays(value) if isinstance(value, Mapping) else value
    return unpacked


# --- the base seed, which torch draws for its workers on the default device -----------------


def base_seed_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return a copy of the generator from which torch's loader draws its base seed.

    Args:
        generator: the loader's own; if ``None`` it is the one of the default device.

    Returns:
        A generator on the same device in the same state; ``None`` for a device without random
        numbers, such as ``"meta"``.

    Example:
        >>> import torch
        >>> from accel_callbacks.data.order import base_seed_generator
        >>> copy = base_seed_generator(None)
        >>> bool(torch.rand(1, generator=copy) == torch.rand(1))
        True
    """
    device = torch.get_default_device() if generator is None else generator.device
    if generator is not None:
        state = generator.get_state()
    elif device.type == "cpu":
        state = torch.default_generator.get_state()
    elif (module := getattr(torch, device.type, None)) is None:
        return None
    else:
        state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    copy = torch.Generator(device=device)
    copy.set_state(state)
    return copy


def draw_base_seed(generator: torch.Generator | None) -> None:
    """Draw a number as torch's loader does for its base seed.

    Args:
        generator: the loader's own, or ``None``.
    """
    device = torch.get_default_device()
    torch.empty((), dtype=torch.int64, device=device).random_(generator=generator)


def seeded_generator(seed: int) -> torch.Generator:
    """Return a generator for torch's loader, which takes one of the default device only.

    Args:
        seed: the seed.

    Example:
        >>> from accel_callbacks.data.order import seeded_generator
        >>> seeded_generator(3).initial_seed()
        3
    """
    device = torch.get_default_device()
    if not hasattr(torch, device.type) and device.type != "cpu":  # it has no random numbers
        device = torch.device("cpu")
    return torch.Generator(device=device).manual_seed(seed)
