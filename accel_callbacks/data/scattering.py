"""Sending each process its part of a batch: the structure when it changes, tensors always."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accel_callbacks.collectives.nested import leaves, map_leaves, map_tensors
from accel_callbacks.errors import RemoteError

__all__ = ["AlreadyTold", "Receiver", "Sender"]

_ALIGNED = 16  # so that a tensor of any type can begin there
_HEAD = 6  # of a header, before what each process keeps
_BATCH, _END = 0, 1


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in a structure, and in the bytes that are sent."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next tensor may begin."""
        return self.start + -(-self.size // _ALIGNED) * _ALIGNED


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is no more than its numbers, one after the other."""
    odd = tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided
    return type(tensor) is torch.Tensor and not odd


def _is_slot(item: Any) -> bool:
    return isinstance(item, _Slot)


@dataclass(frozen=True)
class _Failed:
    """Sent instead of a structure."""

    report: str


def _wire() -> torch.device:
    """Where tensors travel: a user's own group may be NCCL alone."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _packed(batch: Any) -> tuple[Any, torch.Tensor]:
    """(the structure with slots for tensors, the bytes of the tensors)."""
    tensors: list[tuple[_Slot, torch.Tensor]] = []
    end = 0

    def slot(tensor: torch.Tensor) -> Any:
        nonlocal end
        if not _is_plain(tensor):
            return tensor  # travels with the structure
        place = _Slot(end, tensor.dtype, tuple(tensor.shape))
        tensors.append((place, tensor))
        end = place.end
        return place

    layout = map_tensors(batch, slot)
    data = torch.empty(end, dtype=torch.uint8)
    for place, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        data[place.start : place.start + place.size] = flat
    return layout, data


def _unpacked(layout: Any, data: torch.Tensor) -> Any:
    def tensor(slot: _Slot) -> torch.Tensor:
        flat = data[slot.start : slot.start + slot.size]
        return flat.view(slot.dtype).reshape(slot.shape)

    return map_leaves(layout, tensor, _is_slot)


def _bytes_of(layout: Any) -> int:
    """Length of the data that belongs to a layout."""
    return max((leaf.value.end for leaf in leaves(layout, _is_slot)), default=0)


def _signature(layout: Any) -> Any:
    """Something equal for equal layouts; raises TypeError where that cannot be told."""
    kind = type(layout)
    if layout is None or kind in (_Slot, str, bytes, bool, int):
        return kind, layout
    if kind is float:
        return kind, repr(layout)
    if kind in (list, tuple) or hasattr(layout, "_fields"):
        return kind, tuple(_signature(item) for item in layout)
    if kind is dict:
        return kind, tuple((key, _signature(item)) for key, item in layout.items())
    raise TypeError(kind)


class Sender:
    """The main process's end. What it sends is what :class:`Receiver` waits for, call by call."""

    def __init__(self) -> None:
        self._known: Any = None

    def batch(self, pieces: list[Any], numbers: list[int], kept: list[int]) -> None:
        """Send each process its piece; ``kept`` has an entry for each process."""
        packed = [_packed(piece) for piece in pieces]
        layouts = [layout for layout, _ in packed]
        try:
            known: Any = [_signature(layout) for layout in layouts[1:]]
        except TypeError:
            known = None
        news = known is None or known != self._known
        self._known = known
        self._head(_BATCH, news, numbers, kept)
        if news:
            self._structures(layouts)
        wire = _wire()
        parts = [(rank, data.to(wire)) for rank, (_, data) in enumerate(packed) if rank]
        pending = [dist.isend(data, rank) for rank, data in parts if data.numel()]
        for work in pending:
            if work is not None:
                work.wait()

    def end(self) -> None:
        """Tell that the pass is over."""
        self._head(_END, False, [0, 0, 0, 0], [0] * dist.get_world_size())

    def failure(self, report: str) -> None:
        """Tell that there will be no further batch, and why."""
        self._known = None
        world = dist.get_world_size()
        self._head(_BATCH, True, [0, 0, 0, 0], [0] * world)
        self._structures([_Failed(report)] * world)

    def _head(self, kind: int, news: bool, numbers: list[int], kept: list[int]) -> None:
        head = torch.tensor([kind, int(news), *numbers, *kept], dtype=torch.int64, device=_wire())
        dist.broadcast(head, src=0)

    def _structures(self, layouts: list[Any]) -> None:
        """Send what is no tensor. What cannot be pickled releases the others with an error."""
        own: list[Any] = [None]
        try:
            dist.scatter_object_list(own, layouts, src=0)
        except Exception as problem:
            self._known = None
            failed = _Failed(f"a batch cannot be sent to the other processes: {problem!r}")
            dist.scatter_object_list(own, [failed] * len(layouts), src=0)
            raise AlreadyTold(problem) from problem


class AlreadyTold(Exception):
    """The other processes know of this failure."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(problem)
        self.problem = problem


class Receiver:
    """The end of the other processes.

    Args:
        pinned: receive into pinned memory, so that copies to the device need not be waited for.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._layout: Any = None

    def batch(self) -> tuple[Any, list[int], list[int]] | None:
        """(this process's piece, numbers, kept) as they were sent; None at the end.

        Raises:
            RemoteError: the main process failed.
        """
        wire = _wire()
        head = torch.empty(_HEAD + dist.get_world_size(), dtype=torch.int64, device=wire)
        dist.broadcast(head, src=0)
        kind, news, *numbers = head.tolist()
        if kind == _END:
            return None
        if news:
            own: list[Any] = [None]
            dist.scatter_object_list(own, None, src=0)
            self._layout = own[0]
        if isinstance(self._layout, _Failed):
            report, self._layout = self._layout.report, None
            raise RemoteError(rank=0, where="reading the data", details=report)
        size = _bytes_of(self._layout)
        data = torch.empty(size, dtype=torch.uint8, device=wire, pin_memory=self._pins(wire))
        if size:
            dist.recv(data, src=0)
        return _unpacked(self._layout, data.cpu()), numbers[:4], numbers[4:]

    def _pins(self, wire: torch.device) -> bool:
        return self._pinned and wire.type == "cpu"
