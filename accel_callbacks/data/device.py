"""Move batches to the device, the next one during the computation on the current one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_callbacks.collectives.nested import map_leaves
from accel_callbacks.data.sources import Delivery

__all__ = ["Feed", "device_feed", "is_on", "send_to_device"]

_PLAIN = (str, bytes, int, float, complex, torch.dtype, torch.device)
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
        non_blocking: do not wait for copies from pinned memory. Ignored for a device without
            streams, and for MPS, where torch copies whatever is in memory by then.
        skip_keys: keys of dicts, on any level, whose values are not moved.

    Example:
        >>> import torch
        >>> from accel_callbacks import send_to_device
        >>> send_to_device((torch.ones(1), "label"), "cpu")
        (tensor([1.]), 'label')
    """
    skipped = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    return _send(tensor, device, non_blocking and _orders_copies(torch.device(device)), skipped)


def is_on(data: Any, device: torch.device | str | int) -> bool:
    """Return whether nothing of a nested structure has to be moved to a device, as far as is plain.

    Also in graphs of ``torch.compile``, which :func:`send_to_device` may break.

    Args:
        data: tensors in lists, tuples and dicts; of other objects it is not known.
        device: the device; a number is that of an accelerator.

    Example:
        >>> import torch
        >>> from accel_callbacks.data.device import is_on
        >>> is_on((torch.ones(1), "label"), "cpu"), is_on({"x": object()}, "cpu")
        (True, False)
    """
    if isinstance(data, torch.Tensor):
        if isinstance(device, int):
            return data.device.type != "cpu" and data.device.index == device
        return data.device == torch.device(device)
    if isinstance(data, (tuple, list)):
        return all(is_on(item, device) for item in data)
    if type(data) is dict:
        return all(is_on(value, device) for value in data.values())
    return data is None or isinstance(data, _PLAIN)


def _orders_copies(device: torch.device) -> bool:
    """Return whether a device copies on streams, so that nothing is read before it has arrived.

    Not MPS, even with streams: a copy that is not waited for reads the source when that may be
    freed or overwritten already (pytorch#139550, pytorch#189690).
    """
    module = getattr(torch, device.type, None)
    return device.type != "mps" and hasattr(module, "Stream") and hasattr(module, "stream")


def _send(item: Any, device: Any, non_blocking: bool, skipped: frozenset[str]) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device, non_blocking=non_blocking and item.device.type != "mps")
    kind = type(item)
    if kind in (tuple, list):
        return kind(_send(entry, device, non_blocking, skipped) for entry in item)
    if isinstance(item, _Movable):
        return _send_object(item, device, non_blocking)
    if isinstance(item, Mapping):
        moved = {
            key: entry if key in skipped else _send(entry, device, non_blocking, skipped)
            for key, entry in item.items()
        }
        return moved if kind is dict else _like(item, moved)
    return map_leaves(
        item,
        lambda leaf: _send(leaf, device, non_blocking, skipped),
        lambda leaf: isinstance(leaf, (_Movable, Mapping)),
    )


def _like(item: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """Return a mapping of the same class with these entries, and its other attributes."""
    if not isinstance(item, MutableMapping):
        return type(item)(entries)  # type: ignore[call-arg]
    new = copy(item)
    for key, entry in entries.items():
        new[key] = entry
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
            has streams; from pinned memory, the copy does not block the program either. Never on
            MPS.

    Example:
        >>> import torch
        >>> from accel_callbacks.data.device import device_feed
        >>> device_feed(torch.device("cpu")) is None
        True
    """
    if device.type == "cpu":
        return None
    if non_blocking and _orders_copies(device):
        return StreamFeed(device, getattr(torch, device.type))
    return partial(_move_each, device=device)


def _move_each(pairs: Pairs, device: torch.device) -> Pairs:
    for batch, delivery in pairs:
        yield send_to_device(batch, device), delivery


class StreamFeed:
    """Copy one batch ahead, on a side stream.

    At the peak three batches are on the device: the one that the script still holds, the one that
    it asks for, and the one that is being copied.

    Args:
        device: the target device.
        module: the torch module of that device type, for example ``torch.cuda``.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module

    def __call__(self, pairs: Pairs) -> Pairs:
        device = self._device
        if device.index is None and hasattr(self._module, "current_device"):
            device = torch.device(device.type, self._module.current_device())
        side = _side_stream(self._module, device)
        ahead: tuple[_BatchCopy, Delivery, Any] | None = None
        for batch, delivery in pairs:
            with self._module.stream(side):
                copy = _BatchCopy(batch, self._device)
                copied = side.record_event()
            if ahead is not None:
                yield self._hand_over(*ahead)
            ahead = copy, delivery, copied
        if ahead is not None:
            yield self._hand_over(*ahead)

    def _hand_over(
        self, ahead: _BatchCopy, delivery: Delivery, copied: Any
    ) -> tuple[Any, Delivery]:
        """Return the batch for the computing stream, which waits for the copy."""
        stream = self._module.current_stream(self._device)
        stream.wait_event(copied)
        for tensor in ahead.tensors:
            if tensor.device.type == self._device.type:
                # The caching allocator would reuse the memory for the next copy on the side
                # stream as soon as the tensor is freed, while kernels still read it.
                tensor.record_stream(stream)
        batch = ahead.batch
        if ahead.is_partial:
            batch = send_to_device(batch, self._device, non_blocking=True)
        return batch, delivery


@cache
def _side_stream(module: Any, device: torch.device) -> Any:
    """Return the stream of copies to a device, the same one in each pass.

    The caching allocator keeps memory by stream: each new stream would hold its own batches.
    """
    return module.Stream(device)


class _BatchCopy:
    """A batch that is being copied to a device, on the stream that is current when it is made.

    Dense tensors are, and the entries of mappings. A sparse or nested tensor, and any other object,
    is moved by its ``to`` where it is used: the memory of each part must be kept until the
    computing stream has read it.

    Attributes:
        batch: the copy.
        tensors: the tensors in it that are copied.
        is_partial: it has objects with ``to``, still to be moved.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._device = device
        self.tensors: list[torch.Tensor] = []
        self.is_partial = False
        self.batch = self._send(batch)

    def _send(self, item: Any) -> Any:
        return map_leaves(item, self._send_leaf, _is_sent)

    def _send_leaf(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor) and _is_dense(item):
            copied = item.to(self._device, non_blocking=True)
            self.tensors.append(copied)
            return copied
        self.is_partial = True
        if isinstance(item, MutableMapping) and getattr(item, "device", None) is None:
            # Such as a BatchEncoding, whose own `to` changes the dataset's object: it is called on
            # a copy. Not a mapping with a device, such as a TensorDict: it keeps its entries there.
            return _like(item, {key: self._send(entry) for key, entry in item.items()})
        return item


def _is_sent(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, _Movable))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has one memory of its own: ``record_stream`` takes no other."""
    composed = tensor.is_nested or is_traceable_wrapper_subclass(tensor)
    return tensor.layout is torch.strided and not composed
