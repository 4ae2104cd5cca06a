"""Raise an error of one rank on all ranks, so that no rank waits for one that is gone.

Every rank passes the same *sync points*, at which the ranks exchange their errors. A rank that
fails between two of them goes to its next sync point at once. It must not start that collective
unless the other ranks come there too: they may be inside another collective, which would then be
paired with it. So before the collective each rank notes in the store which sync point it has
reached, and a failed rank waits a moment for the notes of the others. If these do not appear, the
run is aborted instead, which makes the collective that blocks the others fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import abort_run
from accel_callbacks.distributed.heartbeat import current_heartbeat, remote_failure, stop_heartbeat
from accel_callbacks.distributed.rank_warnings import show_held_warnings
from accel_callbacks.distributed.stack import dump_hang
from accel_callbacks.errors import DistributedOperationException, RemoteError
from accel_callbacks.errors.text import published_text

__all__ = ["leave", "meet", "share_failure", "shared_failure"]

_KEY = "sync_point"  # "{_KEY}/{rank}" in the store: number and name of the last one reached
_POLLING = 0.01  # seconds between two looks at the store
_PATIENCE = 5.0  # seconds that a failed rank waits for the others at its sync point


@contextmanager
def shared_failure(operation: str) -> Iterator[None]:
    """Context manager: raise on all ranks if the block fails on one; a sync point at its end.

    Args:
        operation: shown in the error of the other ranks.

    Raises:
        RemoteError: another rank failed in the block, and this one did not.

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
        try:
            share_failure(error, operation)
        finally:
            error = None  # its traceback has this frame: a cycle


def share_failure(error: BaseException | None, operation: str) -> None:
    """Collective: report this rank's error, or raise :class:`RemoteError` if another rank has one.

    A rank that passes an error of its own only reports it; its caller raises it. If the other
    ranks do not come, because they are in a collective that waits for this rank, the run is
    aborted: their collective fails, and they raise the reported error instead.
    """
    if error is not None and not collectives.has_peers():
        return
    if collectives.world_size() == 1:
        return
    if error is not None:
        # In a turn the other ranks are not at a sync point yet; the end of the turn is one.
        if collectives.current_turn() is None:
            _report(error, operation)
        return
    collectives.refuse_in_turn(operation)
    collectives.run_before(operation)
    point = _next_point(operation)
    try:
        _arrive_at(point)
        reports = collectives.all_objects(None, operation=operation)
    except DistributedOperationException:  # all ranks raise it, and stay connected
        raise
    except RemoteError as problem:
        abort_run(problem, operation)
        raise
    except Exception as problem:
        late = _absent_from(point)  # before the abort, after which the store may be gone
        first = abort_run(problem, operation)
        if first is not problem:
            raise first from problem
        if late:
            raise _too_late(late, operation) from problem
        raise
    for failed, report in enumerate(reports):
        if report is not None:
            raise RemoteError(rank=failed, where=operation, details=report)


def _report(error: BaseException, operation: str) -> None:
    """Send the error to the other ranks at this sync point, or abort what keeps them from it."""
    point = _next_point(operation)
    with suppress(Exception):  # if the others are gone, this error is the one to be seen
        _arrive_at(point)
        if _others_arrive_at(point):
            collectives.all_objects(published_text(error), operation=operation)
            return
    first = abort_run(error, operation)
    # This rank comes to no further point, so that the others do not wait for it at theirs.
    with suppress(Exception):
        _arrive_at(None)
    if first is not error:
        raise first from error  # another rank's error has broken the collective of this one


def meet(operation: str) -> None:
    """Wait until all ranks have come here, before collectives that a rank may start by mistake.

    The others may be in another collective, with which one of this rank would be paired: gloo ends
    the process then, and NCCL hangs. So this waits in the store; it is a sync point.

    Args:
        operation: shown in errors.

    Raises:
        RuntimeError: a rank is elsewhere, or did not come within the timeout of the group.
        RemoteError: another rank failed.
    """
    if collectives.world_size() == 1:
        return
    collectives.refuse_in_turn(operation)
    collectives.run_before(operation)
    point = _next_point(operation)
    deadline = time.monotonic() + collectives.group_timeout().total_seconds()
    try:
        _arrive_at(point)
        while absent := _not_yet_at(point):
            remote_failure.raise_in(operation)
            watch = current_heartbeat()
            if watch is not None and (gone := watch.find_gone(absent)):
                raise watch.error_of(gone, operation)
            if time.monotonic() > deadline:
                raise _too_late(absent, operation)
            time.sleep(_POLLING)
    except Exception as problem:
        first = abort_run(problem, operation)
        if first is not problem:
            raise first from problem
        raise


def leave(operation: str) -> None:
    """Wait until all ranks have come here, and leave the group; the host of its store leaves last.

    The ranks watch each other until they have met; a sync point.

    Args:
        operation: shown in errors.

    Raises:
        LostRankError: a rank has ended before, or hangs.
        RuntimeError: a rank is elsewhere, or did not come within the timeout of the group.
    """
    meet(operation)
    show_held_warnings()  # rank 0 has posted those that it has shown
    stop_heartbeat()
    if collectives.world_size() == 1:
        return
    point, deadline = _next_point(operation), time.monotonic() + _PATIENCE
    with suppress(dist.DistError):
        _arrive_at(point)
        while collectives.rank() == 0 and _not_yet_at(point) and time.monotonic() < deadline:
            time.sleep(_POLLING)


def _not_yet_at(point: str) -> list[int]:
    """Return the ranks that have not reached a sync point.

    Raises:
        RuntimeError: a rank is at another one in its place, so it will not come.
    """
    number, _, operation = point.partition(" ")
    absent = []
    for rank, last in _points_of(range(collectives.world_size())):
        count, _, name = (last or "").partition(" ")
        if count == number and name != operation:
            raise RuntimeError(
                f"rank {rank} is at {name} while this one is at {operation}: make the same calls "
                "on all ranks; a call inside of `if is_main_process:` is made on one."
            )
        if not count.isdecimal() or int(count) < int(number):
            absent.append(rank)
    return absent


def _too_late(ranks: list[int], operation: str) -> RuntimeError:
    watch = current_heartbeat()
    places = watch.last_seen(ranks) if watch is not None else ""
    seen = f" ({places})" if places else ""
    return RuntimeError(
        f"ranks {ranks} did not come to {operation} within the timeout of the process group"
        f"{seen}: check what they do there, or give them longer with "
        f"Accelerator(timeout=...).{dump_hang(collectives.rank())}"
    )


def _next_point(operation: str) -> str:
    # By default group: after an abort, ranks agree only on the points of a new group.
    return f"{collectives.next_number(_KEY)} {operation}"


def _arrive_at(point: str | None) -> None:
    """Note in the store which sync point this rank has reached; None for no further one."""
    collectives.store().set(f"{_KEY}/{collectives.rank()}", str(point))


def _points_of(ranks: Sequence[int]) -> Iterator[tuple[int, str | None]]:
    """Return ranks with the sync point that each has reached last."""
    # In one trip to the store: all ranks ask at the same time, each for all the others.
    return zip(ranks, collectives.store().read([f"{_KEY}/{rank}" for rank in ranks]), strict=True)


def _absent_from(point: str) -> list[int]:
    """Return the ranks that are not at this sync point, none if the store is gone."""
    with suppress(Exception):
        ranks = range(collectives.world_size())
        return [rank for rank, last in _points_of(ranks) if last != point]
    return []


def _others_arrive_at(point: str) -> bool:
    """Return whether all other ranks reach this sync point soon.

    A rank at a sync point of the same number and another name waits at the end of another block:
    the ranks have diverged, and it will never come here.
    """
    number = point.partition(" ")[0]
    deadline = time.monotonic() + _PATIENCE
    absent = sorted({*range(collectives.world_size())} - {collectives.rank()})
    while absent and time.monotonic() < deadline:
        for rank, reached in _points_of(list(absent)):
            if reached == point:
                absent.remove(rank)
            elif reached is not None and (reached == "None" or reached.split(" ")[0] == number):
                return False
        time.sleep(0.01 if absent else 0)
    return not absent
