"""Random generators of all processes, set to the state they have on rank 0."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from typing import Any

import torch

from accel_callbacks.collectives import broadcast_object, world_size
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.errors import nearest

__all__ = ["RNGType", "synchronize_rng_state", "synchronize_rng_states"]


class RNGType(str, Enum):
    """A random generator that can be synchronised.

    ``generator`` is one that is passed along, the others are torch's own: of the CPU, or of the
    current device of that kind.

    Example:
        >>> from accel_callbacks import RNGType
        >>> RNGType("torch") is RNGType.TORCH
        True
    """

    TORCH = "torch"
    CUDA = "cuda"
    MPS = "mps"
    XPU = "xpu"
    GENERATOR = "generator"


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Give generators the state that they have on rank 0; on all processes or on none.

    Args:
        rng_types: which ones, see :class:`RNGType`.
        generator: the one meant by ``"generator"``.

    Raises:
        ValueError: an unknown type, ``"generator"`` without one, or a device that is not there.
        RemoteError: another process could not take part.

    Example:
        >>> import torch
        >>> from accel_callbacks import synchronize_rng_states
        >>> synchronize_rng_states(["torch", "generator"], torch.Generator())
    """
    with shared_failure("synchronize_rng_states"):
        kinds = [_kind(name) for name in rng_types]
        sources = [_source(kind, generator) for kind in kinds]
        before = [source.get() for source in sources]
    if world_size() == 1:
        return
    names, states = broadcast_object((kinds, before))
    try:
        with shared_failure("synchronize_rng_states"):
            if names != kinds:
                raise ValueError(
                    f"rng_types differ: rank 0 has {_values(names)}, this process {_values(kinds)}."
                )
            for source, state in zip(sources, states, strict=True):
                source.set(state)
    except BaseException:
        for source, state in zip(sources, before, strict=True):
            with suppress(Exception):  # the one that could not be set
                source.set(state)
        raise


def synchronize_rng_state(
    rng_type: str | RNGType | None = None, generator: torch.Generator | None = None
) -> None:
    """Give one generator the state that it has on rank 0.

    Args:
        rng_type: which one, see :class:`RNGType`; if ``None``, ``generator`` where one is given,
            else torch's.
        generator: the one meant by ``"generator"``.

    Raises:
        ValueError: as :func:`synchronize_rng_states`.
        RemoteError: another process could not take part.

    Example:
        >>> from accel_callbacks import synchronize_rng_state
        >>> synchronize_rng_state("torch")
    """
    default = RNGType.TORCH if generator is None else RNGType.GENERATOR
    synchronize_rng_states([default if rng_type is None else rng_type], generator)


class _Source:
    """Where a state is read and written: torch, the module of a device, or a generator."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def get(self) -> torch.Tensor:
        """The state, on the CPU."""
        state: torch.Tensor = getattr(self._owner, f"get_{self._name}")()
        return state

    def set(self, state: torch.Tensor) -> None:
        """Take over a state."""
        getattr(self._owner, f"set_{self._name}")(state)


def _kind(name: str | RNGType) -> RNGType:
    known = [kind.value for kind in RNGType]
    if name not in known:
        raise ValueError(
            f"rng_type={name!r} is unknown; use one of {known}.{nearest(str(name), known)}"
        )
    return RNGType(name)


def _source(kind: RNGType, generator: torch.Generator | None) -> _Source:
    if kind is RNGType.TORCH:
        return _Source(torch, "rng_state")
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise ValueError('rng_type="generator" needs generator=, a torch.Generator.')
        return _Source(generator, "state")
    module = torch.get_device_module(kind.value)
    if not (torch.accelerator.is_available() and module.is_available()):
        raise ValueError(f"rng_type={kind.value!r}: this process has no such device.")
    return _Source(module, "rng_state")


def _values(kinds: Iterable[RNGType]) -> list[str]:
    return [kind.value for kind in kinds]
