"""Blocks in which one process goes first and the others follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from accel_callbacks import collectives
from accel_callbacks.distributed.failures import share_failure, shared_failure
from accel_callbacks.distributed.topology import process_rank

__all__ = ["local_main_process_first", "main_process_first"]


@contextmanager
def _goes_first(leads: bool, where: str) -> Iterator[None]:
    """Two meetings: when those who lead have finished, and when the others have."""
    if _is_ordered_already(where):
        yield
        return
    if not leads:
        share_failure(None, where)
    with shared_failure(where), collectives.turn(where):
        yield
    if leads:
        share_failure(None, where)


def _is_ordered_already(where: str) -> bool:
    """True in a block inside of another such block, which lets the same processes go first."""
    outer = collectives.current_turn()
    _, world, _, local_world = process_rank()
    if outer not in (None, where) and local_world != world:
        raise RuntimeError(
            f"{where} inside of {outer} cannot be ordered on several machines: use the same one "
            "for both blocks, or put them one after the other."
        )
    return outer is not None


def main_process_first() -> AbstractContextManager[None]:
    """Context manager: rank 0 runs the block first, the others when it has finished.

    All leave it together, once the last has finished: an error in it on any process ends it on all
    of them, so that none waits for a process that is gone. A block inside of another one runs in
    the turn of that one. A collective in it would wait for ever, and is refused.

    Raises:
        RemoteError: another process failed in its turn.
        RuntimeError: a collective in the block.

    Example:
        >>> from accel_callbacks import main_process_first
        >>> with main_process_first():
        ...     vocabulary = {"a": 0, "b": 1}
    """
    return _goes_first(process_rank()[0] == 0, "main_process_first")


def local_main_process_first() -> AbstractContextManager[None]:
    """Context manager: the first process of each machine runs the block before the others.

    Else it is like :func:`main_process_first`.

    Raises:
        RemoteError: another process failed in its turn.
        RuntimeError: a collective in the block.

    Example:
        >>> from accel_callbacks import local_main_process_first
        >>> with local_main_process_first():
        ...     cache = [1, 2]
    """
    return _goes_first(process_rank()[2] == 0, "local_main_process_first")
