"""Seed, capture, restore and synchronize random generators."""

from __future__ import annotations

import os
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

import torch

from accel_callbacks.collectives import all_objects, broadcast_object, rank, world_size
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.topology import process_data_rank
from accel_callbacks.errors import nearest
from checkpoint_io.warning import warn

__all__ = [
    "RNGType",
    "capture_rng",
    "device_seeds",
    "devices_of",
    "restore_rng",
    "set_seed",
    "share_rng",
    "synchronize_rng_state",
    "synchronize_rng_states",
]

#: Called with each seed: those of devices that ``torch.manual_seed`` leaves out.
device_seeds: list[Callable[[int], object]] = []


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch, on all devices.

    Args:
        seed: any integer from 0 to 2**32 - 1.
        device_specific: add the rank, so that ranks draw different numbers; with a
            :class:`ParallelismConfig`, the rank among those that read different data, so that the
            ranks of one model draw the same. The latest Accelerator, else ``accel launch``, says
            which these are.
        deterministic: also make torch raise for nondeterministic operations, and turn cuDNN's
            benchmarking off. Slower; it stays on.

    Warns:
        UserWarning: ``deterministic`` on CUDA without the environment variable that cuBLAS needs.

    Example:
        >>> import torch
        >>> from accel_callbacks import set_seed
        >>> set_seed(0)
        >>> first = torch.rand(1)
        >>> set_seed(0)
        >>> bool(torch.rand(1) == first)
        True
    """
    seed += process_data_rank() if device_specific else 0
    random.seed(seed)
    torch.manual_seed(seed)
    for seed_device in device_seeds:
        seed_device(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        if torch.cuda.is_available() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            warn(
                "matrix products on CUDA are not deterministic, and raise an error: start the "
                "script with CUBLAS_WORKSPACE_CONFIG=:4096:8 in its environment.",
            )


def capture_rng(device: torch.device, others: Iterable[torch.device] = ()) -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy, torch and the devices.

    Each is held as bytes: a checkpoint then needs no tensor file for this rank, and does not go
    through 625 numbers one by one.

    Args:
        device: the device of this process.
        others: more devices that it computes on. Of no other device the state is asked, which
            would take memory there.

    Example:
        >>> import random, torch
        >>> from accel_callbacks.distributed.rng import capture_rng, restore_rng
        >>> state = capture_rng(torch.device("cpu"))
        >>> first = random.random()
        >>> restore_rng(state, torch.device("cpu"))
        >>> random.random() == first
        True
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, array("I", words).tobytes(), gauss),
        "torch": _bytes(torch.get_rng_state()),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        held = numpy.random.get_state()
        # Anything but a tuple is of a bit generator that somebody has put in place of NumPy's.
        state["numpy"] = (
            (held[0], held[1].tobytes(), *held[2:]) if isinstance(held, tuple) else held
        )
    if device.type != "cpu":
        module = torch.get_device_module(device)
        state[device.type] = _bytes(module.get_rng_state(*_device_args(device)))
    if more := {
        str(other): _bytes(torch.get_device_module(other).get_rng_state(*_device_args(other)))
        for other in _other_devices(device, others)
    }:
        state["other_devices"] = more
    return state


def restore_rng(
    state: Mapping[str, Any], device: torch.device, others: Iterable[torch.device] = ()
) -> None:
    """Restore what :func:`capture_rng` returned, now or in versions that kept arrays and lists.

    Args:
        state: the state.
        device: the device of this process.
        others: more devices that it computes on; those of which there is no state are left.
    """
    version, words, gauss = state["python"]
    random.setstate((version, _words(words), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        saved = state["numpy"]
        if isinstance(saved, tuple) and isinstance(saved[1], bytes):
            saved = (saved[0], numpy.frombuffer(saved[1], dtype=numpy.uint32), *saved[2:])
        numpy.random.set_state(saved)
    if device.type in state:
        module = torch.get_device_module(device)
        module.set_rng_state(_tensor(state[device.type]), *_device_args(device))
    for other in _other_devices(device, others):
        if (saved := state.get("other_devices", {}).get(str(other))) is not None:
            torch.get_device_module(other).set_rng_state(_tensor(saved), *_device_args(other))


def share_rng(copies: int, device: torch.device) -> None:
    """Collective: set the generators of ranks that read the same data to those of the first one.

    Args:
        copies: number of neighboring ranks that read the same data.
        device: the device of this process.
    """
    states = all_objects(capture_rng(device))
    first = rank() // copies * copies
    if first != rank():
        restore_rng(states[first], device)


def devices_of(models: Iterable[torch.nn.Module]) -> set[torch.device]:
    """Return the devices of the parameters of models."""
    return {parameter.device for model in models for parameter in model.parameters()}


def _other_devices(device: torch.device, others: Iterable[torch.device]) -> list[torch.device]:
    """Return the devices that have random numbers of their own, without ``device``."""
    index = _index(device)
    apart = {other for other in others if _has_generator(other) and _index(other) != index}
    return sorted(apart, key=str)


def _has_generator(device: torch.device) -> bool:
    return device.type != "cpu" and hasattr(getattr(torch, device.type, None), "get_rng_state")


def _index(device: torch.device) -> tuple[str, int | None]:
    """Return type and index of a device; without an index it is the current one."""
    if device.index is not None or device.type in ("cpu", "meta"):
        return device.type, device.index
    current = getattr(torch.get_device_module(device), "current_device", None)
    return device.type, 0 if current is None else int(current())


def _bytes(state: torch.Tensor) -> bytes:
    data: bytes = state.cpu().numpy().tobytes()
    return data


def _tensor(state: bytes | torch.Tensor) -> torch.Tensor:
    if isinstance(state, torch.Tensor):
        return state
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _words(state: bytes | Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of Python's generator as a tuple, as ``random.setstate`` insists on."""
    if not isinstance(state, bytes):
        return tuple(state)
    words = array("I")
    words.frombytes(state)
    return tuple(words)


def _device_args(device: torch.device) -> tuple[torch.device, ...]:
    # torch.mps has one device, and its functions take no argument for it.
    return () if device.type == "mps" else (device,)


class RNGType(str, Enum):
    """A random generator that can be synchronized.

    ``generator`` is one that is passed as an argument, the others are torch's own: of the CPU, or
    of the current device of that type.

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

    @classmethod
    def list(cls) -> Any:
        """Return the values."""
        return [member.value for member in cls]


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Set generators to their state on rank 0, on all ranks or on none.

    Args:
        rng_types: which ones, see :class:`RNGType`.
        generator: the generator that ``"generator"`` stands for.

    Raises:
        ValueError: an unknown type, ``"generator"`` without one, or a device that does not exist.
        RemoteError: another rank failed.

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
    # Either all ranks have the states of rank 0 afterwards, or each has its own again.
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
            with suppress(Exception):  # setting this one may be what failed
                source.set(state)
        raise


def synchronize_rng_state(
    rng_type: str | RNGType | None = None, generator: torch.Generator | None = None
) -> None:
    """Set one generator to its state on rank 0.

    Args:
        rng_type: which one, see :class:`RNGType`; if ``None``, ``generator`` if one is given, else
            torch's.
        generator: the generator that ``"generator"`` stands for.

    Raises:
        ValueError: as :func:`synchronize_rng_states`.
        RemoteError: another rank failed.

    Example:
        >>> from accel_callbacks import synchronize_rng_state
        >>> synchronize_rng_state("torch")
    """
    default = RNGType.TORCH if generator is None else RNGType.GENERATOR
    synchronize_rng_states([default if rng_type is None else rng_type], generator)


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
    # A torch built for a device has its module even where the machine has no such device.
    if not (torch.accelerator.is_available() and module.is_available()):
        raise ValueError(f"rng_type={kind.value!r}: this process has no such device.")
    return _Source(module, "rng_state")


class _Source:
    """A generator state behind one interface: of torch, of a device module, or of a generator."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def get(self) -> torch.Tensor:
        """Return the state, on the CPU."""
        state: torch.Tensor = getattr(self._owner, f"get_{self._name}")()
        return state

    def set(self, state: torch.Tensor) -> None:
        """Set the state."""
        getattr(self._owner, f"set_{self._name}")(state)


def _values(kinds: Iterable[RNGType]) -> list[str]:
    return [kind.value for kind in kinds]
