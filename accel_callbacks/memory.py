"""Release the memory of what is not used any more, and what torch caches."""

from __future__ import annotations

import gc
from typing import Any

import torch

from accel_callbacks.distributed.topology import own_accelerator

__all__ = ["clear_device_cache", "release_memory"]


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release the memory that torch caches on the device; the CPU has no cache.

    Args:
        garbage_collection: collect unreachable objects first, so that their memory is free.

    Example:
        >>> from accel_callbacks import clear_device_cache
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    kind = own_accelerator()
    if kind is not None:
        torch.get_device_module(kind).empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Collect garbage, empty the device's cache, and return a None for each object.

    Assign the result to the variables that still reference the objects, which frees them.

    Example:
        >>> import torch
        >>> from accel_callbacks import release_memory
        >>> model, batch = torch.nn.Linear(1, 1), torch.ones(1)
        >>> model, batch = release_memory(model, batch)
        >>> model is None and batch is None
        True
    """
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)
