"""An error on one process is an error on all: nobody waits for a process that is gone."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from accel_callbacks import collectives
from accel_callbacks.errors import RemoteError

__all__ = ["share_failure", "shared_failure"]


def share_failure(error: BaseException | None, where: str) -> None:
    """Meet, and raise :class:`RemoteError` here if another process brings an error.

    A process that brings an error of its own only reports it; its caller raises it.
    """
    if error is not None:
        with suppress(Exception):  # where the others are gone, the first error is the one to see
            collectives.gather_object("".join(traceback.format_exception(error)))
        return
    for failed, report in enumerate(collectives.gather_object(None)):
        if report is not None:
            raise RemoteError(rank=failed, where=where, details=report)


@contextmanager
def shared_failure(where: str) -> Iterator[None]:
    """A block that fails on all processes if it fails on one; they meet at its end.

    Args:
        where: shown in the error of the others.

    Raises:
        RemoteError: another process failed in the block, and this one did not.

    Example:
        >>> from accel_callbacks.failures import shared_failure
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
