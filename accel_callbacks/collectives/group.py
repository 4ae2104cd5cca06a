"""The default process group, as the collectives see it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

__all__ = ["current_turn", "on_backend", "rank", "refuse_in_turn", "store", "turn", "world_size"]

# The block in which the processes take turns, if this thread is in one.
_TURN: ContextVar[str | None] = ContextVar("accel_callbacks_turn", default=None)
# The default groups that this process has been in; facts of the process, as the group is.
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_count = itertools.count()


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
