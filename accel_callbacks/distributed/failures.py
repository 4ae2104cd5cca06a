"""An error on one process is an error on all: nobody waits for a process that is gone."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import end_with
from accel_callbacks.errors import DistributedOperationException, RemoteError

__all__ = ["share_failure", "shared_failure"]

_PLACE = "meeting"  # and the rank: number and name of the meeting it came to last
_PATIENCE = 5.0  # seconds in which the others have to come to where a process has failed
# How many meetings there were in each group; after an error only those of a new one are alike.
_meetings: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()


def share_failure(error: BaseException | None, where: str) -> None:
    """Meet, and raise :class:`RemoteError` here if another process brings an error.

    A process that brings an error of its own only reports it; its caller raises it. If the others
    do not come, because they are in a collective that waits for this process, the run ends for
    all: their collective fails, and in its place they get the report.
    """
    if collectives.world_size() == 1:
        return
    if error is not None:
        if collectives.current_turn() is None:  # in a turn, the end of the turn reports it
            _report(error, where)
        return
    collectives.refuse_in_turn(where)
    meeting = _next_meeting(where)
    try:
        _come_to(meeting)
        reports = collectives.all_objects(None, operation=where)
    except DistributedOperationException:
        raise
    except Exception as problem:
        late = _late_for(meeting)
        first = end_with(problem, where)
        if first is not problem:
            raise first from problem
        if late:
            raise RuntimeError(
                f"ranks {late} did not come to {where} within the timeout of the process group: "
                "look what they do there, or give them longer with Accelerator(timeout=...)."
            ) from problem
        raise
    for failed, report in enumerate(reports):
        if report is not None:
            raise RemoteError(rank=failed, where=where, details=report)


def _report(error: BaseException, where: str) -> None:
    """Tell the others where they meet, or break what keeps them from it."""
    meeting = _next_meeting(where)
    with suppress(Exception):  # where the others are gone, the first error is the one to see
        _come_to(meeting)
        if _others_come_to(meeting):
            text = "".join(traceback.format_exception(error))
            collectives.all_objects(text, operation=where)
            return
    first = end_with(error, where)
    with suppress(Exception):
        _come_to(None)
    if first is not error:
        raise first from error  # what broke the collective of this process


def _next_meeting(where: str) -> str:
    number = next(_meetings.setdefault(dist.group.WORLD, itertools.count()))
    return f"{number} {where}"


def _come_to(meeting: str | None) -> None:
    """Leave word at the store that this process is at a meeting, or (None) comes to no more."""
    collectives.store().set(f"{_PLACE}/{collectives.rank()}", str(meeting))


def _place(store: Any, rank: int) -> str:
    """The meeting that a process came to last."""
    key = f"{_PLACE}/{rank}"
    return str(store.get(key).decode()) if store.check([key]) else ""


def _late_for(meeting: str) -> list[int]:
    """The ranks that are not at this meeting, as far as the store can still tell."""
    with suppress(Exception):
        store = collectives.store()
        return [one for one in range(collectives.world_size()) if _place(store, one) != meeting]
    return []


def _others_come_to(meeting: str) -> bool:
    """False also where another waits for this process at the end of another block."""
    number = meeting.partition(" ")[0]
    store, deadline = collectives.store(), time.monotonic() + _PATIENCE
    waited_for = set(range(collectives.world_size())) - {collectives.rank()}
    while waited_for and time.monotonic() < deadline:
        for rank in list(waited_for):
            place = _place(store, rank)
            if place == meeting:
                waited_for.remove(rank)
            elif place == "None" or place.partition(" ")[0] == number:
                return False
        time.sleep(0.01 if waited_for else 0)
    return not waited_for


@contextmanager
def shared_failure(where: str) -> Iterator[None]:
    """A block that fails on all processes if it fails on one; they meet at its end.

    Args:
        where: shown in the error of the others.

    Raises:
        RemoteError: another process failed in the block, and this one did not.

    Example:
        >>> from accel_callbacks.distributed.failures import shared_failure
        >>> with shared_failure("reading the data"):
        ...     data = [1, 2]
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as problem:
        error = problem
        raise
    finally:
        share_failure(error, where)
