"""The lease of a folder: one process writes there, until it releases the folder or dies.

The lease is one small file, `.lease.json`. Its holder renews it every few seconds, on a thread of
its own: a store that is slow must not silence what else a process has to report. Whoever wants the
lease of a holder on this machine looks at the process; of another machine, it watches for renewals
by its own monotonic clock, as the clocks of two machines cannot be compared.

A local record is read and written under a lock of the file. An object is put on the condition that
it is still the one that was read. Where there are no locks or conditions, the record is read back
after a pause: of two that start within the same moment the later one to write wins there, and the
other learns it.

A record that is there and cannot be read or taken may be that of a holder that lives, so it is a
`LeaseError`. What prevents that there is one at all, such as a read-only disk, is raised as it is.
"""

from __future__ import annotations

import atexit
import errno
import json
import math
import os
import platform
import secrets
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args

from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointWarning,
    CorruptCheckpointError,
    LeaseError,
)
from checkpoint_io.local_files import make_folders
from checkpoint_io.storage.file_lock import NO_LOCKS, lock_file, unlock_file
from checkpoint_io.storage.local import local_folder
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.warning import warn

__all__ = ["LEASE", "Lease", "LeaseHolder", "OnConflict"]

OnConflict = Literal["refuse", "wait", "take_over"]

LEASE = ".lease.json"  # a dot: scripts look for the newest name in a folder
MISSED = 6  # renewals without which a holder on another machine is dead
_BYTES = 2048  # of a local record, padded, so that it is written in one piece
_TRIES = 50
_LOCK_TRIES = 250
_PAUSE = 0.02  # seconds between two tries at a record that another process changes
_LOOKS = 5  # at a record that may be half of the next one
_LONGEST_GAP = 2.0  # seconds between two looks that count: a longer one was a pause of this process
_SETTLE = 1.0  # seconds until a store without conditions shows who wrote last
_RECENT = 0.2  # seconds for which a look at a local record is recent

Decide = Callable[["LeaseHolder | None"], "LeaseHolder | None"]


@dataclass(frozen=True)
class LeaseHolder:
    """The process that holds the lease of a folder, as it has written there.

    Attributes:
        number: grows by one with each holder, so that the higher of two is the later one.
        renewals: how often it has renewed the lease.
        run_id: of its run; "" if unknown.
        run_name: of its run; "" if unknown.
        host: the name of its machine.
        machine: what only processes that see the same process ids have in common.
        pid: its process id.
        started: when its process started, in units of its machine; "" if unknown.
        since: when it took the lease, by its own clock; for people.
        interval: seconds between two renewals.
        released: it has given the lease back.

    Example:
        >>> from checkpoint_io import Lease
        >>> with Lease("memory://doc-holder", run_name="digits") as lease:
        ...     str(lease.holder).startswith("run 'digits' in process ")
        True
    """

    number: int
    renewals: int
    run_id: str
    run_name: str
    host: str
    machine: str
    pid: int
    started: str
    since: str
    interval: float
    released: bool = False

    def __str__(self) -> str:
        names = [repr(self.run_name) if self.run_name else "", self.run_id and f"({self.run_id})"]
        run = " ".join(name for name in names if name)
        ended = ", which has ended" if self.released else ""
        what = f"run {run} in " if run else ""
        return f"{what}process {self.pid} on {self.host} since {self.since}{ended}"

    def is_same(self, other: LeaseHolder) -> bool:
        """Return whether both are one process."""
        return (self.machine, self.pid, self.started) == (other.machine, other.pid, other.started)


class Lease:
    """The right to write to a folder, renewed until it is released or the process ends.

    All leases of one folder in one process are one: the last to be released gives it back. A
    process that was killed holds nothing: on the same machine its folder is free at once, on
    another one after six renewals did not come.

    Args:
        url: the folder: a local path or any fsspec URL; need not exist yet.
        run_id: of the run, for whoever finds the folder held.
        run_name: the same.
        storage_options: passed to the fsspec driver.
        interval: seconds between two renewals.

    Example:
        >>> from checkpoint_io import Lease
        >>> lease = Lease("memory://doc-lease", run_name="digits").acquire()
        >>> lease.check()
        >>> lease.holder.number
        1
        >>> lease.release()
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        run_id: str = "",
        run_name: str = "",
        storage_options: Mapping[str, Any] | None = None,
        interval: float = 5.0,
    ) -> None:
        store = open_store(url, storage_options)
        folder = local_folder(store)
        # a folder and a link to it are one: their leases in this process are too
        self.url = store.url if folder is None else os.path.realpath(folder)
        self._record: _FileRecord | _ObjectRecord = (
            _ObjectRecord(store) if folder is None else _FileRecord(self.url)
        )
        self._run_id, self._run_name = run_id, run_name
        self._interval = interval
        self._watch = _Watch()
        self._grant: _Grant | None = None

    @property
    def holder(self) -> LeaseHolder | None:
        """This process as the holder; None before :meth:`acquire` and after :meth:`release`."""
        return None if self._grant is None else self._grant.own

    @property
    def pause(self) -> float:
        """Seconds to wait between two calls of :meth:`attempt`."""
        return self._record.pause

    def acquire(self, on_conflict: OnConflict = "refuse") -> Lease:
        """Take the lease, and return it; do nothing if this process holds it.

        Args:
            on_conflict: if another process holds it: ``"refuse"`` raises where that lives, and
                takes the lease over where it is dead; ``"wait"`` waits for either end;
                ``"take_over"`` takes it from a holder that lives, which then writes nothing more.

        Raises:
            LeaseError: another process holds it, and ``"refuse"``; or there is a record that
                cannot be read or taken, which may be that of another process.
            OSError: no record can be made there; stores raise errors of their own.
            ValueError: ``on_conflict`` is unknown.
        """
        while self.attempt(on_conflict) is not None:
            time.sleep(self.pause)
        return self

    def attempt(self, on_conflict: OnConflict = "refuse") -> LeaseHolder | None:
        """Take the lease if that is possible now; return who is in the way, None if nobody.

        Call it again to go on; see :meth:`acquire`. Of a holder on another machine it takes several
        calls to learn whether it lives.

        Args:
            on_conflict: as for :meth:`acquire`.

        Raises:
            LeaseError: as :meth:`acquire` does, of a process that lives.
            OSError: as :meth:`acquire` does.
            ValueError: ``on_conflict`` is unknown.
        """
        if on_conflict not in get_args(OnConflict):
            raise ValueError(
                f"on_conflict={on_conflict!r} is unknown: use 'refuse', 'wait' or 'take_over'"
            )
        with _lock:
            if self._grant is not None and self._grant.lost is None:
                return None
            grant = _grants.get(self._place)
            if grant is None or grant.is_lost():
                outcome = self._take(on_conflict)
                if isinstance(outcome, LeaseHolder):
                    return outcome
                grant = _grants[self._place] = outcome
                grant.start()
            grant.users += 1
            self._grant = grant
        return None

    @property
    def _place(self) -> tuple[str, str]:
        process = _this_process()
        return f"{process.machine}/{process.pid}", self.url

    def _take(self, on_conflict: OnConflict) -> _Grant | LeaseHolder:
        """Write this process into the record, or return the holder."""
        process = _this_process()
        in_the_way: list[tuple[LeaseHolder, bool | None]] = []
        records: list[LeaseHolder] = []

        # Called again where another process has changed the record meanwhile: the last call counts.
        def decide(holder: LeaseHolder | None) -> LeaseHolder | None:
            in_the_way.clear()
            records.clear()
            if holder is not None and not (
                holder.is_same(process)
                or (self.url in _inherited and _inherited[self.url].is_same(holder))
            ):
                lives = self._watch.lives(holder)
                if lives is not False and on_conflict != "take_over":
                    in_the_way.append((holder, lives))
                    return None
            number = 1 + (holder.number if holder is not None else 0)
            since = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
            records.append(
                replace(
                    process,
                    number=number,
                    run_id=self._run_id,
                    run_name=self._run_name,
                    since=since,
                    interval=self._interval,
                )
            )
            return records[0]

        self._record.change(decide, create=True)
        # Nothing kept a second process from writing too: whoever has written last has the lease.
        if records and not self._record.compares:
            time.sleep(_SETTLE)
            current = self._record.read()
            if current is not None and not current.is_same(process):
                in_the_way.append((current, None))
        if not in_the_way:
            return _Grant(self._record, records[0], self.url)
        holder, lives = in_the_way[0]
        if on_conflict == "refuse" and lives:
            raise LeaseError(
                f"{self.url} is in use by {holder}, which is alive: two runs in one folder would "
                "mix their rows and checkpoints. End that run, give this one a folder of its own, "
                'or start it with on_conflict="wait" or "take_over"'
            )
        return holder

    def find_holder(self) -> LeaseHolder | None:
        """Return the process that holds the lease and lives, this one included; None without one.

        Wait for renewals of a holder on another machine, for at most seven of its intervals.

        Raises:
            LeaseError: there is a record that cannot be read.
        """
        watch = _Watch()
        while (holder := self._record.read()) is not None:
            lives = holder.is_same(_this_process()) or watch.lives(holder)
            if holder.released or lives is False:
                return None
            if lives:
                return holder
            time.sleep(self.pause)
        return None

    def describe(self, run_id: str, run_name: str) -> None:
        """Set the names of the run, and write them if the lease is held."""
        self._run_id, self._run_name = run_id, run_name
        if self._grant is not None:
            self._grant.own = replace(self._grant.own, run_id=run_id, run_name=run_name)
            self._grant.renew()

    def check(self, *, recent: bool = False) -> None:
        """Raise if another process has taken the lease over; call it before a write.

        What cannot be read now is no loss, but a warning once that lasts so long that others take
        this process for dead; a folder that was removed is held again.

        Args:
            recent: for checks that are frequent: a look of the last interval is enough where each
                one is a request to a store, one of the last moment on a disk, and nothing is
                written.

        Raises:
            LeaseError: another process holds it; the text names it.
        """
        if self._grant is not None:
            self._grant.check(recent)

    def release(self) -> None:
        """Give the lease back, unless other leases of this folder in this process remain."""
        grant, self._grant = self._grant, None
        if grant is not None:
            with _lock:
                grant.users -= 1
                if grant.users:
                    return
                if _grants.get(self._place) is grant:
                    del _grants[self._place]
            grant.end()

    def __enter__(self) -> Lease:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


# --- the holder of this process ----------------------------------------------------------------

# The leases of this process by machine and folder: global, as the process is what holds them.
_grants: dict[tuple[str, str], _Grant] = {}
_inherited: dict[str, LeaseHolder] = {}  # those of the process that this one was forked from
_lock = threading.Lock()
_exit_hook: list[Callable[[], None]] = []


class _Grant:
    """A lease that this process holds, and the thread that renews it."""

    def __init__(self, record: _FileRecord | _ObjectRecord, holder: LeaseHolder, url: str) -> None:
        self.own = holder
        self.lost: LeaseHolder | None = None
        self.users = 0
        self._record = record
        self._url = url
        self._looked = _now()
        self._told = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        if not _exit_hook:
            _exit_hook.append(_release_all)
            atexit.register(_release_all)
        threading.Thread(target=self._keep, name=f"lease of {self._url}", daemon=True).start()

    def _keep(self) -> None:
        while not self._ended.wait(self.own.interval) and self.lost is None:
            self.renew()

    def renew(self) -> None:
        """Write that this process lives, as far as the store can be reached."""
        now = _now()
        with suppress(Exception):  # `is_lost` tells of it, before a write
            self._record.change(self._next_record, create=False, lenient=True)
            self._looked = now

    def _next_record(self, holder: LeaseHolder | None) -> LeaseHolder | None:
        """Return the next record of this process; None where it has lost the lease."""
        self._judge(holder)
        if self.lost is not None or self._ended.is_set():
            return None
        self.own = replace(self.own, renewals=self.own.renewals + 1)
        return self.own

    def _judge(self, holder: LeaseHolder | None) -> None:
        """Note whether a record is a later holder's.

        A lower number is what a stale read or a process that was stopped in the middle of its
        renewal shows: the higher one wins.
        """
        if holder is None or holder.number < self.own.number:
            return
        if holder.number > self.own.number or not holder.is_same(self.own):
            self.lost = holder

    def is_lost(self, *, recent: bool = False) -> bool:
        """Read the record, and return whether another process has the lease."""
        age, now = _RECENT if self._record.is_local else self.own.interval, _now()
        # After a loss too: who has the folder by now is what its error names.
        if not recent or now - self._looked >= age:
            try:
                holder = self._record.read(lenient=True)
                self._judge(holder)
                # The folder was removed: it is held again.
                if holder is None and self.lost is None and not recent:
                    self._record.change(self._next_record, create=True, lenient=True)
                self._looked = now
            except Exception as problem:  # each store has its own
                self._tell(problem, now - self._looked)
        return self.lost is not None

    def _tell(self, problem: Exception, seconds: float) -> None:
        """Warn once if the record could not be reached for as long as a holder counts as alive."""
        if seconds > MISSED * self.own.interval and not self._told:
            self._told = True
            warn(
                f"{self._url}: the lease could not be renewed for {seconds:.0f} s ({problem}), so "
                "that a run on another machine may take the folder unseen: make sure that none "
                f"does, and that this process can read and write {LEASE} there",
                CheckpointWarning,
            )

    def check(self, recent: bool) -> None:
        """Raise LeaseError if the lease is lost."""
        if self.is_lost(recent=recent):
            raise LeaseError(
                f"{self._url} was taken over by {self.lost}: this process writes nothing more "
                "there, and ends. Start it again with a folder of its own to go on beside that run"
            )

    def end(self) -> None:
        """Write that the lease is released, and end the thread."""
        self._ended.set()
        if self.own.pid != os.getpid():  # a fork of the holder
            return

        def decide(holder: LeaseHolder | None) -> LeaseHolder | None:
            ours = holder is not None and holder.is_same(self.own)
            return replace(self.own, released=True) if ours else None

        with suppress(Exception):  # whoever comes next sees that the process has ended
            self._record.change(decide, create=False)


def _release_all() -> None:
    """Give all leases back, at the end of the process."""
    for grant in list(_grants.values()):
        grant.end()


def _after_fork() -> None:
    """Hold nothing in a forked process, which may take over what its parent holds."""
    global _lock
    _lock = threading.Lock()
    _inherited.update({url: grant.own for (_, url), grant in _grants.items()})
    _grants.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# --- who lives ---------------------------------------------------------------------------------


class _Watch:
    """Judges whether a holder lives, by this process's own clock."""

    def __init__(self) -> None:
        self._mark: tuple[int, int] | None = None  # of the newest record seen
        self._silent, self._looked = 0.0, 0.0

    def lives(self, holder: LeaseHolder) -> bool | None:
        """Return whether the holder lives, None if that takes another look."""
        if holder.released:
            return False
        if holder.machine == _this_process().machine:
            lives = _process_lives(holder.pid, holder.started)
            if lives is not None:
                return lives
        mark, now = (holder.number, holder.renewals), time.monotonic()
        if self._mark is None or mark > self._mark:
            # The first look tells nothing: the record may be old. A renewal that is seen to come,
            # between two looks that are close, is a sign of life.
            recent = self._mark is not None and now - self._looked < _LONGEST_GAP
            self._mark, self._silent, self._looked = mark, 0.0, now
            return True if recent else None
        # While this process was stopped it saw no renewals that there may have been.
        self._silent += min(now - self._looked, _LONGEST_GAP)
        self._looked = now
        return False if self._silent > MISSED * holder.interval else None


def _process_lives(pid: int, started: str) -> bool | None:
    """Return whether a process of this machine lives, None if the system does not tell."""
    status = _process_status(pid)
    if status is not None:
        state, begin = status
        # A process id is used again, but with another start time. Z and X are dead ones.
        return state not in "ZX" and (begin == started or not started)
    if sys.platform == "win32":
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None
    return None  # a process has this id; it need not be the same one


def _process_status(pid: int) -> tuple[str, str] | None:
    """Return state and start time of a process, None where the system does not show them."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *rest = words.rpartition(")")[2].split()
        return state, rest[18]
    except (OSError, IndexError, ValueError):
        return None


def _this_process() -> LeaseHolder:
    """Return this process as a holder, without a number."""
    pid = os.getpid()
    status = _process_status(pid)
    return LeaseHolder(
        number=0,
        renewals=0,
        run_id="",
        run_name="",
        host=platform.node(),
        machine=_pid_namespace(),
        pid=pid,
        started=status[1] if status is not None else "",
        since="",
        interval=0.0,
    )


def _pid_namespace() -> str:
    """Identify the PID namespace: the boot id and the inode of the namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{platform.node()}/{uuid.getnode()}"


def _now() -> float:
    """Return seconds of a clock that also runs while the machine sleeps, where there is one."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


# --- the record --------------------------------------------------------------------------------


class _FileRecord:
    """A record on a local disk, changed in place under a lock of its file.

    It is not synced to the disk: after a power cut the process that wrote it is dead too.

    Attributes:
        path: of the record.
        compares: a change is one step, as seen by other processes.
        pause: seconds between two looks.
    """

    is_local = True
    pause = 0.1

    def __init__(self, folder: str) -> None:
        self.compares = True
        self._folder = folder
        self.path = os.path.join(folder, LEASE)

    def read(self, *, lenient: bool = False) -> LeaseHolder | None:
        """Return the holder; None without a record, and with `lenient` for a damaged one."""
        descriptor = self._open(os.O_RDONLY)
        if descriptor is None:
            return None
        try:
            return _holder_in(lambda: _content(descriptor), self.path, lenient)
        finally:
            os.close(descriptor)

    def change(self, decide: Decide, *, create: bool, lenient: bool = False) -> None:
        """Replace the holder, under the lock, by what a function makes of it, unless that is None.

        Without `create`, do nothing where there is no record.
        """
        if create:
            make_folders(self._folder)
        descriptor = self._open(os.O_RDWR | (os.O_CREAT if create else 0))
        if descriptor is None:
            return
        try:
            with _file_lock(descriptor, self.path) as self.compares:
                holder = _holder_in(lambda: _content(descriptor), self.path, lenient)
                new = decide(holder)
                if new is not None:
                    self._write(descriptor, new, holder)
        finally:
            os.close(descriptor)

    def _open(self, flags: int) -> int | None:
        """Open the record; None if there is none."""
        for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY", "O_NONBLOCK"):  # a pipe would hang
            flags |= getattr(os, name, 0)
        try:
            descriptor = os.open(self.path, flags, 0o666)
        except FileNotFoundError:
            return None
        except OSError as error:
            # On a read-only disk nobody takes it here, whatever is in it.
            if error.errno == errno.EROFS or not os.path.lexists(self.path):
                raise
            why = "it is a link" if os.path.islink(self.path) else error.strerror
            raise _unusable(self.path, str(why)) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _unusable(self.path, "it is no regular file")
        return descriptor

    def _write(self, descriptor: int, new: LeaseHolder, old: LeaseHolder | None) -> None:
        try:
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, _encode(new).ljust(_BYTES - 1) + b"\n")
        except OSError as error:
            if old is None:
                raise
            raise _unusable(self.path, str(error.strerror)) from error


class _ObjectRecord:
    """A record in a store, put on the condition that it is still the one that was read."""

    is_local = False
    pause = 1.0

    def __init__(self, store: Store) -> None:
        self._store = store
        self.path = f"{store.url}/{LEASE}"

    @property
    def compares(self) -> bool:
        """True where the store obeys the condition."""
        return self._store.compares

    def read(self, *, lenient: bool = False) -> LeaseHolder | None:
        """Return the holder; None without a record, and with `lenient` for a damaged one."""
        return _holder_in(self._content, self.path, lenient)

    def _content(self) -> bytes:
        """Return the bytes of the record, none without one."""
        for _ in range(_TRIES):
            self._store.forget(LEASE)
            try:
                with self._store.open(LEASE) as reader:
                    return bytes(reader.read(0, min(reader.size, _BYTES)))
            except (FileNotFoundError, NotADirectoryError):
                return b""
            except CorruptCheckpointError:  # renewed between the two requests of a read
                continue
            except Exception as error:  # each store has its own
                raise _unusable(self.path, str(error)) from error
        raise _unusable(self.path, _CHANGES)

    def change(self, decide: Decide, *, create: bool, lenient: bool = False) -> None:
        """Do the same; call the function again if another process has changed it meanwhile."""
        for _ in range(_TRIES):
            token = self._token()  # first: a change between the two is a conflict
            if not token and not create:
                return
            new = decide(self.read(lenient=lenient) if token else None)
            if new is None:
                return
            try:
                temporary = f"lease-{secrets.token_hex(8)}.tmp"
                self._store.replace(LEASE, _encode(new), temporary, expected=token)
                return
            except CheckpointConflictError:
                time.sleep(_PAUSE * (1 + secrets.randbelow(8)))
            except Exception as error:
                if self._token():  # of another process, or ours, whose answer was lost
                    raise _unusable(self.path, str(error)) from error
                raise
        raise _unusable(self.path, _CHANGES)

    def _token(self) -> str:
        try:
            return self._store.token(LEASE)
        except Exception as error:  # each store has its own
            raise _unusable(self.path, str(error)) from error


_CHANGES = "other processes change it all the time"


def _unusable(path: str, why: str) -> LeaseError:
    """Return the error for a record that may be that of a process which writes to the folder."""
    return LeaseError(
        f"{path} says which process writes to its folder, and cannot be read or taken: {why}. Make "
        "sure that no other run writes there; then remove that file, or allow this user to read "
        "and write it. Or give this run a folder of its own"
    )


@contextmanager
def _file_lock(descriptor: int, path: str) -> Iterator[bool]:
    """Lock an open file during the block; yield False where there are no locks."""
    locked = True
    for _ in range(_LOCK_TRIES):
        try:
            lock_file(descriptor)
            break
        except ImportError:  # a Python without the module of its system's locks
            locked = False
            break
        except OSError as error:
            if error.errno in NO_LOCKS:
                locked = False
                break
        time.sleep(_PAUSE)
    else:
        raise _unusable(path, "another process has locked it (the command `fuser` names it)")
    try:
        yield locked
    finally:
        with suppress(OSError, ImportError):
            unlock_file(descriptor)


def _content(descriptor: int) -> bytes:
    """Return the bytes of a local record."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, _BYTES)


def _encode(holder: LeaseHolder) -> bytes:
    """Return the bytes of a record, in which names are as long as there is room for."""
    data = json.dumps({"format": _FORMAT, **asdict(holder)}, indent=1).encode("ascii")
    if len(data) < _BYTES:
        return data
    run_id, run_name = (name[: len(name) // 2] for name in (holder.run_id, holder.run_name))
    return _encode(replace(holder, run_id=run_id, run_name=run_name))


def _holder_in(look: Callable[[], bytes], path: str, lenient: bool) -> LeaseHolder | None:
    """Return the holder in a record; None for an empty one, and with `lenient` for a damaged one.

    Raises:
        LeaseError: the record is damaged.
    """
    for attempt in range(_LOOKS):
        data = look()
        # killed before the first byte, or zeros after a power cut: nobody writes there any more
        if not data.strip(b"\0 \r\n"):
            return None
        try:
            return _parse(data)
        except ValueError as error:
            if lenient:
                return None
            if attempt == _LOOKS - 1:
                raise _unusable(path, f"it is damaged ({error})") from error
        time.sleep(_PAUSE)  # without a lock, the next record may be half written
    raise AssertionError("not reached")


def _parse(data: bytes) -> LeaseHolder:
    """Return the holder in a record; raise ValueError for what is no record of this format."""
    try:
        words = json.loads(data)
        number = words["format"]
        holder = LeaseHolder(**{field.name: words[field.name] for field in fields(LeaseHolder)})
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if number != _FORMAT:
        raise ValueError(f"format {number!r} is of another version of checkpoint_io")
    for name, kinds in _KINDS.items():
        if type(getattr(holder, name)) not in kinds:
            raise ValueError(f"{name} is {getattr(holder, name)!r}")
    if not (0 < holder.pid < 1 << 31 and holder.number > 0 <= holder.interval < math.inf):
        raise ValueError("a number is out of range")
    return holder


_FORMAT = 1
_TYPES = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_KINDS = {field.name: _TYPES[str(field.type)] for field in fields(LeaseHolder)}
