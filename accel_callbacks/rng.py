"""The random generators of one process, captured and put back."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["capture_rng", "restore_rng", "set_seed"]


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The state of Python's, NumPy's, torch's and the device's generators.

    Example:
        >>> import random, torch
        >>> from accel_callbacks.rng import capture_rng, restore_rng
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
