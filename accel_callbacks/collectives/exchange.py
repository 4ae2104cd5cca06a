"""Objects between processes, without any check of who calls what."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from accel_callbacks.collectives.group import rank, world_size

__all__ = ["exchange", "send_object", "source_of"]

T = TypeVar("T")


class _Unsendable(NamedTuple):
    """Travels instead of an object that cannot, so that no process waits for it."""

    reason: str


class _Seal:
    """Packed after an object: an error before it is the object's, one after it is not."""

    reached = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.reached = True
        return tuple, ()


def exchange(value: T) -> list[T]:
    """What each process passed, in rank order.

    Raises:
        TypeError: on all processes, where one passed what cannot be pickled.
        Exception: on a process that does not know the class of an object that another passed.
    """
    if world_size() == 1:
        return [value]
    held: list[Any] = [None] * world_size()
    seal = _Seal()
    try:
        dist.all_gather_object(held, (value, seal))
    except Exception as error:
        if seal.reached:
            raise
        dist.all_gather_object(held, (_unsendable(error), None))
        raise TypeError(_complaint(rank(), held[rank()][0])) from error
    parts = [part for part, _ in held]
    for index, part in enumerate(parts):
        if isinstance(part, _Unsendable):
            raise TypeError(_complaint(index, part))
    return parts


def send_object(value: T, source: int) -> T:
    """What the process ``source`` passed; raises as :func:`exchange` does."""
    if world_size() == 1:
        return value
    seal = _Seal()
    box: list[Any] = [(value, seal) if rank() == source else None]
    try:
        dist.broadcast_object_list(box, src=source)
    except Exception as error:
        if seal.reached or rank() != source:
            raise
        box = [(_unsendable(error), None)]
        dist.broadcast_object_list(box, src=source)
        raise TypeError(_complaint(source, box[0][0])) from error
    sent = box[0][0]
    if isinstance(sent, _Unsendable):
        raise TypeError(_complaint(source, sent))
    return cast(T, sent)


def source_of(from_process: int) -> int:
    """The rank to send from, if there is such a process."""
    if not 0 <= from_process < world_size():
        raise ValueError(
            f"from_process={from_process} is none of the {world_size()} processes; ranks begin "
            "at 0."
        )
    return from_process


def _unsendable(error: Exception) -> _Unsendable:
    return _Unsendable(f"{type(error).__name__}: {error}")


def _complaint(index: int, part: _Unsendable) -> str:
    return f"process {index} passed an object that cannot be sent, {part.reason}."
