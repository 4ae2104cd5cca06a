"""Moving batches to the device of this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

__all__ = ["device_mover", "send_to_device"]


def send_to_device(batch: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """A nested structure with its tensors (and all that has ``.to``) on a device.

    Args:
        batch: tensors in lists, tuples, named tuples, dicts or dataclasses; the rest stays.
        device: where to.
        non_blocking: do not wait for copies from pinned memory.

    Example:
        >>> import torch
        >>> from accel_callbacks import send_to_device
        >>> send_to_device((torch.ones(1), "label"), "cpu")
        (tensor([1.]), 'label')
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if type(batch) in (tuple, list):
        return type(batch)(send_to_device(item, device, non_blocking) for item in batch)
    if type(batch) is dict:
        return {key: send_to_device(item, device, non_blocking) for key, item in batch.items()}
    if isinstance(batch, _Movable):
        return batch.to(device)
    return apply_to_collection(
        batch, _Movable, lambda item: send_to_device(item, device, non_blocking)
    )


class _Movable(ABC):
    """Whatever has a method ``to`` (a field of that name, as in a letter, is none)."""

    @abstractmethod
    def to(self, device: Any) -> Any:
        """The same on another device."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return callable(getattr(kind, "to", None))


def device_mover(device: torch.device) -> Callable[[Any], Any] | None:
    """A function that moves a batch to the device, ``None`` where loaders deliver it there."""
    if device.type == "cpu":
        return None
    return lambda batch: send_to_device(batch, device, non_blocking=True)
