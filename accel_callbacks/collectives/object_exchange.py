"""Exchange of picklable objects among all ranks; a small object takes one short message.

torch's own collectives of objects send sizes first, and gather over a ring, where each rank waits
for all others in turn. Votes, errors and positions are small: here each rank sends one message of
a fixed size to rank 0, which sends all of them on. What is longer, torch's own collectives send.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from accel_callbacks.collectives.group import (
    control_group,
    rank,
    serves_cpu,
    world_size,
)

__all__ = ["exchange", "send_object"]

_SHORT = 1024  # bytes of the first message
_SIZE = 8  # bytes of it that hold the size of the object
_ROOM = _SHORT - _SIZE
T = TypeVar("T")


class _Unsendable(NamedTuple):
    """Sent in place of an object that cannot be pickled, so that no rank waits for it."""

    reason: str


def exchange(value: T, group: Any = None) -> list[T]:
    """Collective: return the objects that all ranks passed, in rank order.

    Args:
        value: a picklable object.
        group: of all ranks; default: the control group.

    Raises:
        TypeError: on all ranks, if an object cannot be pickled.
        Exception: on a rank that cannot import the class of an object of another rank.
    """
    if group is None and world_size() == 1:
        return [value]
    content, error = _pickle_value(value)
    parts = [pickle.loads(part) for part in _gather(content, group or control_group())]
    for index, part in enumerate(parts):
        if isinstance(part, _Unsendable):
            raise TypeError(_complaint(index, part)) from (error if index == rank() else None)
    return parts


def send_object(value: T, source: int, group: Any = None) -> T:
    """Collective: return the object that rank ``source`` passed; raise as :func:`exchange`."""
    if group is None and world_size() == 1:
        return value
    content, error = _pickle_value(value) if rank() == source else (b"", None)
    sent = pickle.loads(_broadcast(content, source, group or control_group()))
    if isinstance(sent, _Unsendable):
        raise TypeError(_complaint(source, sent)) from error
    return cast(T, sent)


def _pickle_value(value: Any) -> tuple[bytes, Exception | None]:
    try:
        return pickle.dumps(value), None
    except Exception as error:
        # The other ranks come to the collective; it is completed with the reason.
        return pickle.dumps(_Unsendable(f"{type(error).__name__}: {error}")), error


def _complaint(index: int, part: _Unsendable) -> str:
    return f"process {index} passed an object that cannot be sent, {part.reason}."


def _gather(content: bytes, group: Any) -> list[bytes]:
    """Collective: return the bytes of all ranks."""
    count = dist.get_world_size(group)
    if serves_cpu(group or dist.group.WORLD):
        table = torch.empty(count, _SHORT, dtype=torch.uint8, device="cpu")
        messages = list(table.unbind()) if rank() == 0 else None
        dist.gather(_message(content), messages, dst=0, group=group)
        dist.broadcast(table, src=0, group=group)
        sizes, starts = zip(*map(_open_message, table.unbind()), strict=True)
        if max(sizes) <= _ROOM:
            return list(starts)
    held = [b""] * count
    dist.all_gather_object(held, content, group=group)
    return held


def _broadcast(content: bytes, source: int, group: Any) -> bytes:
    """Collective: return the bytes of rank ``source``."""
    if serves_cpu(group or dist.group.WORLD):
        message = _message(content)
        dist.broadcast(message, src=source, group=group)
        size, start = _open_message(message)
        if size <= _ROOM:
            return start
    box = [content]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def _message(content: bytes) -> torch.Tensor:
    """Return the size of the content, and its start, as a message of a fixed size."""
    start = len(content).to_bytes(_SIZE, "little") + content[:_ROOM]
    return torch.frombuffer(bytearray(start.ljust(_SHORT, b"\0")), dtype=torch.uint8)


def _open_message(message: torch.Tensor) -> tuple[int, bytes]:
    """Return the size of the content, and its start, of a message."""
    raw = message.numpy().tobytes()
    size = int.from_bytes(raw[:_SIZE], "little")
    return size, raw[_SIZE : _SIZE + size]
