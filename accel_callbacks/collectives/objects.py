"""Objects, votes and meetings of all processes."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accel_callbacks.collectives.debug import begin
from accel_callbacks.collectives.group import (
    exchange,
    on_backend,
    send_object,
    source_of,
    world_size,
)

__all__ = ["all_objects", "any_process", "barrier", "broadcast_object", "broadcast_object_list"]
__all__ += ["gather_object"]

T = TypeVar("T")


def barrier(*, debug: bool | None = None) -> None:
    """Wait until every process is here."""
    begin("wait_for_everyone", debug)
    if world_size() > 1:
        dist.barrier()


def all_objects(value: T, *, operation: str = "all_objects", debug: bool | None = None) -> list[T]:
    """One list with what each process passed, in rank order; ``operation`` is shown in errors."""
    begin(operation, debug)
    return exchange(value)


def any_process(flag: bool) -> bool:
    """True on every process if it is true on one."""
    begin("any_process")
    if world_size() == 1:
        return flag
    votes = on_backend(torch.tensor([int(flag)], dtype=torch.int32))
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes.item())


def gather_object(object: Any, *, debug: bool | None = None) -> list[Any]:
    """One list with what all processes passed, in rank order.

    Args:
        object: lists and tuples are joined into one list. Anything else (a dict, a text, a number)
            is one entry for each process, as it is. It must be picklable, to be sent.
        debug: compare first what the processes do; what ``ACCEL_DEBUG`` says if ``None``.

    Raises:
        TypeError: on all processes, where one passed what cannot be pickled.
        DistributedOperationException: in debug mode, where the processes do different things.

    Example:
        >>> from accel_callbacks import gather_object
        >>> gather_object(["a", "b"])
        ['a', 'b']
        >>> gather_object({"rank": 0})
        [{'rank': 0}]
    """
    parts = all_objects(object, operation="gather_object", debug=debug)
    if all(isinstance(part, (list, tuple)) for part in parts):
        return list(chain.from_iterable(parts))
    return parts


def broadcast_object(value: T, from_process: int = 0, *, debug: bool | None = None) -> T:
    """The object that ``from_process`` passed, on every process.

    Args:
        value: what to send, picklable; what the other processes pass does not matter.
        from_process: the rank that sends.
        debug: as for :func:`gather_object`.

    Raises:
        ValueError: there is no such process.
        TypeError: on all processes, where the object cannot be pickled.
        DistributedOperationException: in debug mode, where the processes do different things.

    Example:
        >>> from accel_callbacks import broadcast_object
        >>> broadcast_object("run-7")
        'run-7'
    """
    source = source_of(from_process)
    begin("broadcast_object", debug, from_process=from_process)
    return send_object(value, source)


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, debug: bool | None = None
) -> list[Any]:
    """Fill a list in place with what ``from_process`` has in its own, and return it.

    Args:
        object_list: a list of picklable objects; its length may differ on the other processes.
        from_process: the rank that sends.
        debug: as for :func:`gather_object`.

    Raises:
        ValueError: there is no such process.
        TypeError: not a list; or, on all processes, what cannot be pickled.
        DistributedOperationException: in debug mode, where the processes do different things.

    Example:
        >>> from accel_callbacks import broadcast_object_list
        >>> broadcast_object_list([{"seed": 7}, "name"])
        [{'seed': 7}, 'name']
    """
    source = source_of(from_process)
    begin("broadcast_object_list", debug, from_process=from_process)
    sent = send_object(object_list, source)
    if not isinstance(object_list, list):
        raise TypeError(
            f"object_list is a {type(object_list).__name__} and cannot be filled: pass a list, or "
            "use broadcast_object."
        )
    object_list[:] = sent
    return object_list
