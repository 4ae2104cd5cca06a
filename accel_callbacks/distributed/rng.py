"""Set_seed, capture / restore / synchronize generators."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

import torch

from accel_callbacks.collectives import broadcast_object, world_size
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.errors import nearest

__all__ = [
    "RNGType",
    "capture_rng",
    "restore_rng",
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The state of Python's, NumPy's, torch's and the device's generators.

    Example:
        >>> import random, torch
        >>> from accel_callbacks.distributed.rng import capture_rng, restore_rng
        >>> state = capture_rng(torch.device("cpu"))
        >>> first = random.random()
        >>> restore_rng(state, torch.device("cpu"))
        >>> random.random() == first
        True
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back what :func:`capture_rng` gave."""
    random.setstate(_tuples(state["python"]))
    torch.set_rng_state(state["torch"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """Apple's module has one device and takes no argument that names it."""
    return () if device.type == "mps" else (device,)


def _tuples(value: Any) -> Any:
    """Python's ``random`` insists on tuples, whatever the state travelled through."""
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators, on all devices.

    Args:
        seed: any integer from 0 to 2**32 - 1.
        device_specific: add the rank, so that processes draw differently.
        deterministic: also make torch refuse operations whose results differ from call to call,
            and let cuDNN choose its algorithms without trying them. Slower; it stays on.

    Warns:
        UserWarning: ``deterministic`` on CUDA, and a variable that cuBLAS needs is not set.

    Example:
        >>> import torch
        >>> from accel_callbacks import set_seed
        >>> set_seed(0)
        >>> first = torch.rand(1)
        >>> set_seed(0)
        >>> bool(torch.rand(1) == first)
        True
    """
    from accel_callbacks.distributed.topology import process_rank

    seed += process_rank()[0] if device_specific else 0
    random.seed(seed)
    torch.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))
    if deterministic:
        _be_deterministic()


def _be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    if torch.cuda.is_available() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        warnings.warn(
            "matrix products on CUDA are not deterministic, and raise an error: start the script "
            "with CUBLAS_WORKSPACE_CONFIG=:4096:8 in its environment.",
            stacklevel=3,
        )


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
