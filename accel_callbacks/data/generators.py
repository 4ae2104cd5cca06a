"""The random generators of a pass: their states, and the seed that torch draws for its workers.

torch's loader draws this base seed on the default device at the start of each pass.
"""

from __future__ import annotations

import random
import sys
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

__all__ = [
    "GLOBAL",
    "Generators",
    "base_seed_generator",
    "draw_base_seed",
    "packed_state",
    "seeded_generator",
    "set_packed_state",
]

#: A state of :class:`Generators`: a tree of plain values.
State = Mapping[str, Any]
#: The global generators.
GLOBAL = ("torch", "python", "numpy")


class Generators:
    """The random generators that a sampler may draw from.

    Args:
        kinds: those of the global ones, of ``"torch"``, ``"python"`` and ``"numpy"``.
        private: the sampler's own, of torch, Python or NumPy.

    Example:
        >>> import random
        >>> from accel_callbacks.data.generators import Generators
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

    def restore(self, state: State) -> None:
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
        >>> from accel_callbacks.data.generators import packed_state, set_packed_state
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


# --- the base seed ---------------------------------------------------------------------------


def base_seed_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return a copy of the generator from which torch's loader draws its base seed.

    Args:
        generator: the loader's own; if ``None`` it is the one of the default device.

    Returns:
        A generator on the same device in the same state; ``None`` for a device without random
        numbers, such as ``"meta"``.

    Example:
        >>> import torch
        >>> from accel_callbacks.data.generators import base_seed_generator
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
        >>> from accel_callbacks.data.generators import seeded_generator
        >>> seeded_generator(3).initial_seed()
        3
    """
    device = torch.get_default_device()
    if not hasattr(torch, device.type) and device.type != "cpu":  # it has no random numbers
        device = torch.device("cpu")
    return torch.Generator(device=device).manual_seed(seed)
