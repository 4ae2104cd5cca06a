"""Collectives over picklable objects, flags, and the barrier."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accel_callbacks.collectives.debug import begin
from accel_callbacks.collectives.group import (
    control_group,
    explained,
    group_for,
    on_backend,
    source_of,
    world_size,
)
from accel_callbacks.collectives.object_exchange import exchange, send_object

__all__ = [
    "all_objects",
    "any_process",
    "barrier",
    "broadcast_object",
    "broadcast_object_list",
    "gather_object",
]

T = TypeVar("T")


@explained("wait_for_everyone")
def barrier(*, debug: bool | None = None) -> None:
    """Block until all ranks have reached this point."""
    begin("wait_for_everyone", debug)
    if world_size() > 1:
        dist.barrier(group=control_group())


def all_objects(value: T, *, operation: str = "all_objects", debug: bool | None = None) -> list[T]:
    """Return the objects of all ranks in rank order; ``operation`` is shown in errors."""
    begin(operation, debug)
    with explained(operation):
        return exchange(value)


@explained("any_process")
def any_process(flag: bool) -> bool:
    """Return True on all ranks if the flag is True on one."""
    begin("any_process")
    if world_size() == 1:
        return flag
    votes = on_backend(torch.tensor([int(flag)], dtype=torch.int32, device="cpu"))
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=group_for(votes))
    return bool(votes.item())


def gather_object(object: Any, *, debug: bool | None = None) -> list[Any]:
    """Gather the objects of all processes into one list, in rank order.

    Processes that share a model, and have read the same batch, are not told apart:
    ``Accelerator.gather_for_metrics`` does.

    Args:
        object: a picklable object. Lists and tuples are joined into one list; anything else (a
            dict, a string, a number) is one entry for each process.
        debug: first compare the calls of all processes; read from ``ACCEL_DEBUG`` if ``None``.

    Raises:
        TypeError: on all processes, if an object cannot be pickled.
        DistributedOperationException: in debug mode, if the calls of the processes differ.

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


@explained("broadcast_object")
def broadcast_object(value: T, from_process: int = 0, *, debug: bool | None = None) -> T:
    """Return the object that ``from_process`` passed, on every process.

    Args:
        value: the picklable object to send; it is ignored on the other processes.
        from_process: the rank that sends.
        debug: as for :func:`gather_object`.

    Raises:
        ValueError: the rank does not exist.
        TypeError: on all processes, if the object cannot be pickled.
        DistributedOperationException: in debug mode, if the calls of the processes differ.

    Example:
        >>> from accel_callbacks import broadcast_object
        >>> broadcast_object("run-7")
        'run-7'
    """
    source = source_of(from_process)
    begin("broadcast_object", debug, from_process=from_process)
    return send_object(value, source)


@explained("broadcast_object_list")
def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, debug: bool | None = None
) -> list[Any]:
    """Replace the items of a list by those of ``from_process`` in place, and return it.

    Args:
        object_list: a list of picklable objects; its length may differ on the other processes.
        from_process: the rank that sends.
        debug: as for :func:`gather_object`.

    Raises:
        ValueError: the rank does not exist.
        TypeError: it is no list; or, on all processes, an object cannot be pickled.
        DistributedOperationException: in debug mode, if the calls of the processes differ.

    Example:
        >>> from accel_callbacks import broadcast_object_list
        >>> broadcast_object_list([{"seed": 7}, "name"])
        [{'seed': 7}, 'name']
    """
    source = source_of(from_process)
    begin("broadcast_object_list", debug, from_process=from_process)
    sent = send_object(object_list, source)
    # Checked after the collective: a rank that raised before it would leave the others waiting.
    if not isinstance(object_list, list):
        raise TypeError(
            f"object_list is a {type(object_list).__name__} and cannot be filled: pass a list, or "
            "use broadcast_object."
        )
    object_list[:] = sent
    return object_list
