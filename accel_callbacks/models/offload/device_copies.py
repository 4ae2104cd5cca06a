"""Copies of units to an accelerator: from pinned memory, on a stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = ["DeviceCopies", "PinnedBuffers", "device_copies", "pinned"]

_PAGE = 4096  # what direct reads ask of addresses
_BUFFERS = 2  # one that is read into, one that is copied from


class DeviceCopies:
    """Order the copies to a device and its computations by events, without blocking the host.

    A copy begins after the computations that have been started with the memory's last contents,
    and computations with it begin after the copy.

    Args:
        device: the device.
        module: its torch module, such as ``torch.cuda``.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module
        self._stream = module.Stream(device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory on the device."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Freed while a copy is on its way, it would go to the next computation.
        memory.record_stream(self._stream)
        return memory

    def current(self) -> Any:
        """Return the stream of this thread's computations."""
        return self._module.current_stream(self._device)

    def marks(self, streams: Iterable[Any]) -> list[Any]:
        """Record an event on each of these streams."""
        return [self._mark(stream) for stream in streams]

    def wait(self, copied: Any, stream: Any) -> None:
        """Make a stream wait for a copy."""
        stream.wait_event(copied)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Any]) -> Any:
        """Start copies; return the event that marks their end.

        Args:
            pairs: each tensor of the device with its source in host memory.
            after: events that come before.
        """
        with self._module.stream(self._stream):
            for mark in after:
                self._stream.wait_event(mark)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._mark(self._stream)

    def _mark(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event


class PinnedBuffers:
    """Host memory that units are read into, and copied from.

    Args:
        nbytes: of each buffer.
        count: of the buffers.
    """

    def __init__(self, nbytes: int, count: int = _BUFFERS) -> None:
        self._nbytes = nbytes
        self._count = count
        self._buffers: deque[tuple[torch.Tensor, Any]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers now."""
        return sum(buffer.untyped_storage().nbytes() for buffer, _ in self._buffers)

    def next(self) -> torch.Tensor:
        """Return the oldest buffer, after the copy from it has ended."""
        if len(self._buffers) < self._count:
            return _allocate_pinned(self._nbytes)
        buffer, copied = self._buffers.popleft()
        if copied is not None:
            copied.synchronize()
        return buffer

    def give(self, buffer: torch.Tensor, copied: Any) -> None:
        """Return a buffer to the pool, with the event that marks the end of its copy."""
        self._buffers.append((buffer, copied))


def device_copies(device: torch.device) -> DeviceCopies | None:
    """Return the copies of a device; None for one without streams, as the CPU and MPS."""
    from checkpoint_io.format.pinned import streams_of

    module = None if device.type == "mps" else streams_of(device)
    return DeviceCopies(device, module) if hasattr(module, "Stream") else None


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in pinned memory, or the tensor itself if none can be allocated."""
    if tensor.device.type != "cpu" or not tensor.nbytes or tensor.is_pinned():
        return tensor
    try:
        memory = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:
        return tensor
    return memory.copy_(tensor)


def _allocate_pinned(nbytes: int) -> torch.Tensor:
    from checkpoint_io.format.pinned import pinned_memory

    memory = pinned_memory(nbytes + _PAGE)
    if memory is None:
        memory = torch.empty(nbytes + _PAGE, dtype=torch.uint8, device="cpu")
    begin = -memory.data_ptr() % _PAGE
    return memory[begin : begin + nbytes]
