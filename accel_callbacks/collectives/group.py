"""The default group; raw object exchange."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

__all__ = [
    "current_turn",
    "exchange",
    "on_backend",
    "rank",
    "refuse_in_turn",
    "send_object",
    "source_of",
    "store",
    "turn",
    "world_size",
]

# The block in which the processes take turns, if this thread is in one.
_TURN: ContextVar[str | None] = ContextVar("accel_callbacks_turn", default=None)
# The default groups that this process has been in; facts of the process, as the group is.
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_count = itertools.count()
T = TypeVar("T")


def world_size() -> int:
    """Number of processes in the default group, 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Index of this process in the default group, 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def store() -> dist.distributed_c10d.Store:
    """Notes between the processes of the default group, whoever made the group.

    A launcher's store outlives the group, and what an earlier group has left there is not read.
    """
    if dist.group.WORLD not in _numbers:
        _numbers[dist.group.WORLD] = next(_count)
    place = f"accel_callbacks/group{_numbers[dist.group.WORLD]}"
    return dist.distributed_c10d.PrefixStore(place, dist.distributed_c10d._get_default_store())


def on_backend(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where the group's backend takes it (a user's own group may serve one device)."""
    backend = dist.get_backend()
    if backend == "nccl" and tensor.device.type == "cpu":
        return tensor.cuda()
    return tensor.cpu() if backend == "gloo" else tensor


@contextmanager
def turn(where: str) -> Iterator[None]:
    """A block that processes run one after the other, so that no collective can end in it."""
    token = _TURN.set(where)
    try:
        yield
    finally:
        _TURN.reset(token)


def current_turn() -> str | None:
    """The name of the :func:`turn` that this thread is in, None outside."""
    return _TURN.get()


def refuse_in_turn(operation: str) -> None:
    """Raise where the collective would wait for processes that wait for this one."""
    where = _TURN.get()
    if where is not None:
        raise RuntimeError(
            f"{operation} inside of {where} would wait for ever: the processes run that block one "
            "after the other. Move it out of the block."
        )


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
