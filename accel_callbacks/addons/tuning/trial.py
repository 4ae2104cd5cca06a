"""Restore objects after trial steps, and make the axes to plot them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from accel_callbacks.callbacks.host_state import capture
from accel_callbacks.distributed.rng import capture_rng, restore_rng
from accel_callbacks.distributed.topology import own_accelerator

__all__ = ["new_axes", "restored"]


def new_axes(instead: str) -> Any:
    """Return the axes of a new matplotlib figure.

    Args:
        instead: an alternative to plotting, for the error.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError(
            f"plot() draws with matplotlib: pip install matplotlib. Or {instead}."
        ) from None
    return figures.Figure(figsize=(7, 4), layout="constrained").subplots()


@contextmanager
def restored(objects: Sequence[Any]) -> Iterator[None]:
    """Restore objects and the random generators after the block, also after an error.

    Copies are kept in host memory, so that the block can use all of the device's.

    Args:
        objects: models (parameters, buffers, gradients, modes), optimizers, and objects with
            ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: an object is none of these.
        ValueError: a model has lazy parameters.
    """
    undo = [capture(target) for target in objects]
    device = _device_in_use()
    rng = capture_rng(device)
    try:
        yield
    finally:
        for restore in undo:
            restore()
        restore_rng(rng, device)


def _device_in_use() -> torch.device:
    """Return the current accelerator if it is initialized, else the CPU."""
    # Asking an accelerator that is not in use for its RNG state would take memory there.
    kind = own_accelerator()
    if kind is None:
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return torch.device("cpu")
    index = module.current_device() if hasattr(module, "current_device") else 0
    return torch.device(kind.type, index)
