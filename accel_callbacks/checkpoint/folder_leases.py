"""FolderLeases: the leases of the folders that a run writes to."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks.errors import RemoteError
from accel_callbacks.logging import notice
from accel_callbacks.options import OnConflict
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import Lease, LeaseHolder

__all__ = ["Folder", "FolderLeases"]

Folder = tuple[str, "Mapping[str, Any] | None"]  # path or URL, and its storage options

_AGAIN = 60.0  # seconds after which a waiter says again for whom it waits


class FolderLeases:
    """Holds the leases of the folders that a run writes to, on the main process.

    Each is renewed by a thread of its own until it is released, or this process ends. All jobs take
    theirs in one order, and hold none while they wait for another, so that no two wait for each
    other.

    Args:
        on_conflict: what to do if another process holds one; see ``ProjectConfiguration``.
        is_main_process: False on processes that hold none.

    Attributes:
        is_main_process: this process holds them.
        run: the run whose folders all ranks know to be held.
        unguarded: folders in which no lease can be had, and why.
    """

    def __init__(self, on_conflict: OnConflict, *, is_main_process: bool = True) -> None:
        self.run: TrainingRun | None = None
        self._on_conflict = on_conflict
        self.is_main_process = is_main_process
        self._leases: dict[str, Lease] = {}  # by the folder as it was named; some not held yet
        self.unguarded: dict[str, str] = {}
        self._lent: list[str] = []  # folders whose leases are held for saves alone
        self._awaited = ""  # the folder in the way
        self._told, self._told_at, self._began = "", 0.0, 0.0
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
            checkpoint_io.LeaseError: another process holds one, and ``"refuse"``; or there is one
                that cannot be read or taken, or that cannot be waited for.
        """
        wanted = list(folders)
        while (pause := self._attempt(wanted, run)) > 0:
            time.sleep(pause)

    def lend(self, folders: Iterable[Folder], run: TrainingRun) -> None:
        """Hold the leases of folders for a save, until :meth:`return_lent`."""
        wanted = list(folders)
        self._lent += [url for url, _ in wanted if not self.holds(url)]
        self.hold(wanted, run)

    def return_lent(self) -> None:
        """Release what was lent."""
        if self._lent:
            self.release(*self._lent)
            self._lent.clear()

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
            told = None if error is None else (type(error).__name__, str(error))
            pause, told = collectives.broadcast_object((pause, told))
            if told is not None:
                raise error or _error_of(*told)
            time.sleep(pause)
        self.run = run

    def _attempt(self, folders: list[Folder], run: TrainingRun) -> float:
        """Take all leases, or none; return the seconds until the next try, 0 if all are held."""
        if not self.is_main_process:
            return 0.0
        in_the_way = self._take_all(self._find(folders, run), run)
        if in_the_way is None:
            self._awaited = self._told = ""
            return 0.0
        self._awaited, lease, holder = in_the_way
        self._require_order(self._awaited, lease, holder)
        self._tell(self._awaited, holder)
        return lease.pause

    def _take_all(
        self, wanted: list[tuple[str, Lease]], run: TrainingRun
    ) -> tuple[str, Lease, LeaseHolder] | None:
        """Take the leases; give all back where one is in the way, and return it with its holder."""
        for url, lease in wanted:
            # By itself: others that are taken at each try, and given back, are in the way of jobs.
            if url == self._awaited and len(wanted) > 1:
                if (holder := self._take(url, lease, run)) is not None:
                    return url, lease, holder
                lease.release()
        with ExitStack() as taken:
            for url, lease in wanted:
                if (holder := self._take(url, lease, run)) is not None:
                    return url, lease, holder
                taken.callback(lease.release)
            taken.pop_all()
        return None

    def _find(self, folders: list[Folder], run: TrainingRun) -> list[tuple[str, Lease]]:
        """Return the leases that are not held yet, in the order of their folders for all jobs."""
        from checkpoint_io import Lease

        for url, storage_options in folders:
            if url not in self._leases:
                self._leases[url] = Lease(
                    url, run_id=run.run_id, run_name=run.name, storage_options=storage_options
                )
        # Not those that were held and lost: who has lost a folder does not take it back.
        wanted = {url: self._leases[url] for url, _ in folders if not self.holds(url)}
        return sorted(wanted.items(), key=lambda item: item[1].url)

    def _take(self, url: str, lease: Lease, run: TrainingRun) -> LeaseHolder | None:
        """Take a lease, where one can be had; return who is in the way, None if nobody."""
        from checkpoint_io import LeaseError

        try:
            holder = lease.attempt(self._on_conflict)
        except LeaseError:
            raise
        except Exception as problem:  # each store has its own
            self._warn(url, problem, run)
            return None
        self.unguarded.pop(url, None)
        return holder

    def _require_order(self, url: str, lease: Lease, holder: LeaseHolder) -> None:
        """Raise if the holder may wait for a folder that this run has, and cannot give back now."""
        from checkpoint_io import LeaseError

        held = [
            name
            for name, other in self._leases.items()
            if self.holds(name) and other.url > lease.url
        ]
        if held and self._on_conflict == "wait":
            raise LeaseError(
                f"{url} is in use by {holder}, which may wait for {held[0]}, that this run holds: "
                "this run does not wait for it in its middle. End that run, or save to a folder of "
                "this one"
            )

    def _tell(self, url: str, holder: LeaseHolder) -> None:
        """Print which holder of a folder is waited for: at first, and every minute."""
        waits = self._on_conflict == "wait"
        purpose = "for the end of" if waits else "to see whether it lives:"
        text, now = f"{url}: waiting {purpose} {holder}", time.monotonic()
        if not self._told:
            self._began = now
        if text != self._told or now - self._told_at >= _AGAIN:
            minutes = int((now - self._began) // 60)
            notice(f"{text}, for {minutes} min so far" if minutes else text)
            self._told, self._told_at = text, now

    def _warn(self, url: str, problem: Exception, run: TrainingRun) -> None:
        """Say once, and in the run's journal, that nothing keeps other runs from a folder."""
        if url in self.unguarded:
            return
        self.unguarded[url] = f"{type(problem).__name__}: {problem}"
        run.note("unguarded", folder=url, problem=self.unguarded[url])
        warn(
            f"{url}: no lease can be had there ({self.unguarded[url]}). A second run that writes "
            "there is not refused, and rows and checkpoints of the two would mix: allow this user "
            "to create files there, or start no other run in that folder before this one has ended"
        )

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


def _error_of(kind: str, text: str) -> Exception:
    """Return the error that the main process has raised, as the other ranks raise it."""
    from checkpoint_io import LeaseError

    if kind == LeaseError.__name__:
        return LeaseError(text)
    return RemoteError(rank=0, where="taking the leases", details=f"{kind}: {text}")
