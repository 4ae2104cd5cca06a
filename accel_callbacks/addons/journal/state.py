"""Whether a run goes on, and how it has ended."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from accel_callbacks.addons.journal.format import JournalError
from accel_callbacks.checkpoint.project import path_in
from checkpoint_io.local_files import local_path

if TYPE_CHECKING:
    from accel_callbacks.addons.journal.reader import Attempt, Journal
    from checkpoint_io import LeaseHolder

__all__ = ["ended", "holder_of", "state_of"]

_ENDED = {"success": "ended", "failed": "failed", "interrupted": "interrupted"}


def holder_of(folder: str) -> LeaseHolder | None:
    """Return the process that writes the journal of a run now, None if there is none.

    Where the run is on another machine, that takes some seconds.

    Args:
        folder: of the run's journal, path or URL.

    Raises:
        JournalError: the lease of the journal cannot be read.
    """
    from checkpoint_io import Lease, LeaseError

    local = local_path(folder)
    try:
        return None if local is None else Lease(local).find_holder()
    except LeaseError as error:
        raise JournalError(str(error)) from error


def state_of(journal: Journal) -> str:
    """Return how a run is: running, ended, failed, interrupted, killed; or unknown.

    A run is known to go on, or to be killed, by the lease of its journal, which a store has not.
    """
    status = ended(journal.attempts[-1])
    if status is not None:
        return _ENDED.get(status, status)
    from checkpoint_io.storage.lease import LEASE

    local = local_path(journal.folder)
    if local is None or not os.path.exists(path_in(local, LEASE)):
        return "unknown"
    try:
        return "killed" if holder_of(local) is None else "running"
    except JournalError:
        return "unknown"


def ended(attempt: Attempt) -> str | None:
    """Return the status with which an attempt has ended, None if it has not, or was killed."""
    end = next(attempt.marks_of("end"), None)
    return None if end is None else str(end.get("status"))
