"""Move batches to the device, the next one during the computation on the current one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch

from accel_callbacks.collectives.nested import leaves, map_leaves
from accel_callbacks.data.sources import Delivery

__all__ = ["Feed", "device_feed", "send_to_device"]

Pairs = Iterator[tuple[Any, Delivery]]
Feed = Callable[[Pairs], Pairs]


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Iterable[str] | None = None,
) -> Any:
    """Return a nested structure with its tensors (and objects that have ``.to``) on a device.

    Args:
        tensor: tensors in lists, tuples, named tuples, dicts or dataclasses; other values are not
            changed.
        device: the target device.
        non_blocking: do not wait for copies from pinned memory.
        skip_keys: keys of dicts, on any level, whose values are not moved.

    Example:
        >>> import torch
        >>> from accel_callbacks import send_to_device
        >>> send_to_device((torch.ones(1), "label"), "cpu")
        (tensor([1.]), 'label')
    """
    skipped = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    return _send(tensor, device, non_blocking, skipped)


def _send(item: Any, device: Any, non_blocking: bool, skipped: frozenset[str]) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device, non_blocking=non_blocking)
    kind = type(item)
    if kind in (tuple, list):
        return kind(_send(one, device, non_blocking, skipped) for one in item)
    if isinstance(item, _Movable):
        return _send_object(item, device, non_blocking)
    if isinstance(item, Mapping):
        moved = {
            key: one if key in skipped else _send(one, device, non_blocking, skipped)
            for key, one in item.items()
        }
        return moved if kind is dict else _like(item, moved)
    return map_leaves(
        item,
        lambda one: _send(one, device, non_blocking, skipped),
        lambda one: isinstance(one, (_Movable, Mapping)),
    )


def _like(item: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """Return a mapping of the same class with these entries, and its other attributes."""
    if not isinstance(item, MutableMapping):
        return type(item)(entries)  # type: ignore[call-arg]
    new = copy(item)
    for key, one in entries.items():
        new[key] = one
    return new


def _send_object(item: Any, device: Any, non_blocking: bool) -> Any:
    try:
        return item.to(device, non_blocking=non_blocking)
    except TypeError:  # some take a device only
        return item.to(device)


class _Movable(ABC):
    """Any class with a method ``to`` (a field named ``to``, as of an e-mail, does not count)."""

    @abstractmethod
    def to(self, device: Any) -> Any:
        """Return the object on another device."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return callable(getattr(kind, "to", None))


def device_feed(device: torch.device, non_blocking: bool = True) -> Feed | None:
    """Return the feed that moves a loader's batches to the device, ``None`` for the CPU.

    Args:
        device: the target device.
        non_blocking: copy the next batch during the computation on the current one, if the device
            has streams; from pinned memory, the copy does not block the program either.

    Example:
        >>> import torch
        >>> from accel_callbacks.data.device import device_feed
        >>> device_feed(torch.device("cpu")) is None
        True
    """
    if device.type == "cpu":
        return None
    module = getattr(torch, device.type, None)
    if non_blocking and hasattr(module, "Stream") and hasattr(module, "stream"):
        return StreamFeed(device, module)
    return lambda pairs: _moved(pairs, device, non_blocking)


def _moved(pairs: Pairs, device: torch.device, non_blocking: bool) -> Pairs:
    for batch, delivery in pairs:
        yield send_to_device(batch, device, non_blocking), delivery


class StreamFeed:
    """Copy one batch ahead, on a side stream.

    Args:
        device: the target device.
        module: the torch module of that device type, for example ``torch.cuda``.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module

    def __call__(self, pairs: Pairs) -> Pairs:
        side = self._module.Stream(self._device)
        ahead: tuple[Any, Delivery, Any] | None = None
        for batch, delivery in pairs:
            with self._module.stream(side):
                copy = _send_tensors(batch, self._device)
                copied = side.record_event()
            if ahead is not None:
                yield self._hand_over(*ahead)
            ahead = copy, delivery, copied
        if ahead is not None:
            yield self._hand_over(*ahead)

    def _hand_over(self, batch: Any, delivery: Delivery, copied: Any) -> tuple[Any, Delivery]:
        """Return the batch for the computing stream, which waits for the copy."""
        stream = self._module.current_stream(self._device)
        stream.wait_event(copied)
        for tensor in _tensors_in(batch):
            if tensor.device.type == self._device.type:
                # The caching allocator would reuse the memory for the next copy on the side
                # stream as soon as the tensor is freed, while kernels still read it.
                tensor.record_stream(stream)
        # Objects with their own ``to`` hide their tensors, so they are copied on this stream.
        return send_to_device(batch, self._device, non_blocking=True), delivery


def _send_tensors(item: Any, device: torch.device) -> Any:
    """Return the structure with its tensors being copied; other objects with ``to`` are not."""
    if isinstance(item, torch.Tensor):
        return item.to(device, non_blocking=True)
    if isinstance(item, _Movable):
        return item
    return map_leaves(item, lambda one: _send_tensors(one, device), _is_movable)


def _is_movable(item: Any) -> bool:
    return isinstance(item, _Movable)


def _tensors_in(item: Any) -> list[torch.Tensor]:
    """Return the tensors, except those inside of objects with their own ``to``."""
    found = (leaf.value for leaf in leaves(item, _is_movable))
    return [one for one in found if isinstance(one, torch.Tensor)]
