"""Read the memory of a device through a few pinned pieces, which are copied ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

PIECES = 3  # one with the caller, two on their way


class _Piece(NamedTuple):
    """A piece that is being copied: the whole buffer, the part in use, the end of the copy."""

    buffer: torch.Tensor
    host: torch.Tensor
    copied: Any


def streams_of(device: torch.device) -> Any:
    """Return the torch module of a device that copies on streams, None for other devices."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, "Event") and hasattr(module, "current_stream") else None


def pinned_memory(nbytes: int) -> torch.Tensor | None:
    """Return pinned memory from torch's cache, None if there is none to be had."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return None


def read_ahead(
    parts: Iterable[torch.Tensor], module: Any, piece_bytes: int
) -> Iterator[torch.Tensor]:
    """Yield a copy in host memory of each part; it is valid until the next one is asked for.

    Args:
        parts: tensors on one device, each of at most ``piece_bytes``.
        module: the torch module of the device.
        piece_bytes: the size of the pieces.
    """
    waiting: deque[_Piece] = deque()
    for part in parts:
        if len(waiting) < PIECES:
            buffer = pinned_memory(piece_bytes)
        else:
            oldest = waiting.popleft()
            oldest.copied.synchronize()
            yield oldest.host
            buffer = oldest.buffer
        if buffer is None:  # pageable; it is behind all copies on the stream
            buffer = torch.empty(piece_bytes, dtype=torch.uint8, device="cpu")
        waiting.append(_copy(part, buffer, module))
    for piece in waiting:
        piece.copied.synchronize()
        yield piece.host


def _copy(part: torch.Tensor, buffer: torch.Tensor, module: Any) -> _Piece:
    """Enqueue the copy of a part on its device's current stream."""
    plain = part.detach().resolve_conj().resolve_neg().contiguous()
    host = buffer[: plain.nbytes].view(plain.dtype).view(plain.shape)
    host.copy_(plain, non_blocking=True)
    copied = module.Event()
    copied.record(module.current_stream(part.device))
    return _Piece(buffer, host, copied)
