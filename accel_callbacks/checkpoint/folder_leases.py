"""FolderLeases: the leases of the folders that a run writes to."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks._siblings import require_neighbor
from accel_callbacks.config import OnConflict
from accel_callbacks.logging import notice

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import Lease, LeaseHolder

__all__ = ["Folder", "FolderLeases"]

Folder = tuple[str, "Mapping[str, Any] | None"]  # path or URL, and its storage options


class FolderLeases:
    """Holds the leases of the folders that a run writes to, on the main process.

    Each is renewed by a thread of its own until it is released, or this process ends.

    Args:
        on_conflict: what to do if another process holds one; see ``ProjectConfiguration``.
        is_main_process: False on processes that hold none.

    Attributes:
        is_main_process: this process holds them.
        run: the run whose folders all ranks know to be held.
    """

    def __init__(self, on_conflict: OnConflict, *, is_main_process: bool = True) -> None:
        self.run: TrainingRun | None = None
        self._on_conflict = on_conflict
        self.is_main_process = is_main_process
        self._leases: dict[str, Lease] = {}  # by the folder as it was named; some not held yet
        self._told = ""
        self._collected = weakref.finalize(self, _release_apart, self._leases)
        self._collected.atexit = False  # at its exit a process releases what it holds

    def holds(self, url: str) -> bool:
        """Return whether this process holds the lease of a folder."""
        lease = self._leases.get(url)
        return lease is not None and lease.holder is not None

    def hold(self, folders: Iterable[Folder], run: TrainingRun) -> None:
        """Take the leases of folders on this rank alone; do nothing off the main process.

        Args:
            folders: those that are held already are left as they are.
            run: named to whoever finds a folder held.

        Raises:
            checkpoint_io.LeaseError: another process holds one, and ``"refuse"``.
        """
        wanted = list(folders)
        while (pause := self._attempt(wanted, run)) > 0:
            time.sleep(pause)

    def hold_together(self, folders: Iterable[Folder], run: TrainingRun) -> None:
        """Collective: take the leases of folders; raise on all ranks what the main one raises.

        Args:
            folders: those of the main process count.
            run: named to whoever finds a folder held.

        Raises:
            checkpoint_io.LeaseError: as in :meth:`hold`.
        """
        wanted, pause, error = list(folders), 1.0, None
        # In rounds: a rank may wait for hours, which a single collective would not.
        while pause > 0:
            try:
                pause = self._attempt(wanted, run)
            except Exception as problem:
                error = problem
            text = None if error is None else str(error)
            pause, text = collectives.broadcast_object((pause, text))
            if text is not None:
                from checkpoint_io import LeaseError

                raise error or LeaseError(text)
            time.sleep(pause)
        self.run = run

    def _attempt(self, folders: list[Folder], run: TrainingRun) -> float:
        """Take the leases that are free; return the seconds until the next try, 0 if all are held.

        What prevents a lease other than its holder, such as a folder that may not be written, is
        left to whoever writes there to report.
        """
        if not self.is_main_process:
            return 0.0
        require_neighbor("checkpoint_io")
        from checkpoint_io import Lease, LeaseError

        pauses = [0.0]
        for url, storage_options in folders:
            if self.holds(url):  # or did: who has lost it does not take it back
                continue
            try:
                lease = self._leases.get(url) or Lease(
                    url, run_id=run.run_id, run_name=run.name, storage_options=storage_options
                )
                self._leases[url] = lease
                holder = lease.attempt(self._on_conflict)
            except LeaseError:
                raise
            except Exception:
                continue
            if holder is not None:
                self._tell(url, holder)
                pauses.append(lease.pause)
        return max(pauses)

    def _tell(self, url: str, holder: LeaseHolder) -> None:
        """Print once which holder of a folder is waited for."""
        waits = self._on_conflict == "wait"
        purpose = "for the end of" if waits else "to see whether it lives:"
        text = f"{url}: waiting {purpose} {holder}"
        if text != self._told:
            self._told = text
            notice(text)

    def check(self) -> None:
        """Raise if another process has taken a folder over; called before a checkpoint is written.

        Raises:
            checkpoint_io.LeaseError: it has; the text names it.
        """
        for lease in list(self._leases.values()):
            lease.check()

    def check_recent(self) -> None:
        """Do the same from a look that is not older than a moment; called before rows are written.

        Raises:
            checkpoint_io.LeaseError: it has; the text names it.
        """
        for lease in list(self._leases.values()):
            lease.check(recent=True)

    def describe(self, run: TrainingRun) -> None:
        """Write the run's id and name into the leases, if they have others."""
        for lease in self._leases.values():
            holder = lease.holder
            if holder is not None and (holder.run_id, holder.run_name) != (run.run_id, run.name):
                lease.describe(run.run_id, run.name)

    def release(self, *urls: str) -> None:
        """Give the leases of these folders back, or all of them."""
        if not urls:
            self.run = None
        for url in urls or list(self._leases):
            lease = self._leases.pop(url, None)
            if lease is not None:
                lease.release()


def _release_apart(leases: dict[str, Lease]) -> None:
    """Release the leases of an Accelerator that was collected."""
    if leases:
        # In a thread of its own: the collector may run in a thread that holds their lock.
        threading.Thread(target=_release_all, args=(leases,), name="leases' end").start()


def _release_all(leases: dict[str, Lease]) -> None:
    for lease in leases.values():
        lease.release()
