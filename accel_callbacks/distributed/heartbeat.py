"""The heartbeat of each rank, which tells ranks that hang or died from those that are slow.

A rank that is stopped, on a machine that is cut off, or in a process that was killed answers
nobody. Its peers notice in the collectives of training, which have the timeout of the process
group; but a save may take much longer than that, and a collective cannot tell why no answer comes.
So a thread of each rank notes in the store of the group, every second or so, that the process
lives and where its main thread is. A rank without a heartbeat for the timeout of the group is
lost, and the run is aborted on all others. A rank that is only slow keeps its heartbeat.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.util
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.collectives import default_group
from accel_callbacks.collectives.store import BoundedStore, read_keys
from accel_callbacks.distributed.processes import end_workers, fate_of, host_id, stopped_workers
from accel_callbacks.distributed.stack import (
    Call,
    MainThread,
    StuckCalls,
    Wait,
    call_of_torch,
    dump_hang,
    find_divergence,
    is_saving,
    place_of,
    place_of_thread,
    stacks,
    waits_for_worker,
)
from accel_callbacks.errors import LostRankError, RemoteError

__all__ = [
    "REPORT",
    "Heartbeat",
    "LostRank",
    "RemoteFailure",
    "current_heartbeat",
    "is_disconnect",
    "remote_failure",
    "report_progress",
    "start_heartbeat",
    "stop_heartbeat",
]

#: Key in the store of the group under which a rank that fails publishes its error, as JSON.
REPORT = "failure"


# Keys in the store of the group: the heartbeat of each rank, and the first rank that was lost.
_BEAT, _LOST = "heartbeat", "lost"
_LONGEST_INTERVAL = 1.0  # seconds between two heartbeats; a tenth of a short timeout
_READ_ALL = 64  # ranks; of more than that, each reads the heartbeat of its successor and of rank 0
_LONGEST_CALL = 600.0  # seconds that a save may be in one call, if the timeout is not longer
_MISSED = 2.5  # intervals without a heartbeat after which a rank counts as silent
# Parts of the messages with which collectives fail on a closed connection.
_SIGNS = (
    "gloo",
    "NCCL",
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "pair closure",
    "process group",
)
_SHOWN = 8  # ranks whose places an error shows
_WITH, _FOLLOWS = " with ", " after another rank, with "
_ORDERLY = ("exited with code 0", "was killed by SIGTERM", "was killed by SIGINT")


@dataclass(frozen=True)
class LostRank:
    """A rank that died or hangs.

    Args:
        rank: the rank, None if only the store of the group does not answer.
        fate: what happened to it.
        place: where its main thread was last seen; empty if unknown.

    Example:
        >>> from accel_callbacks.distributed.heartbeat import LostRank
        >>> print(LostRank(1, "was killed by SIGKILL", "train.py:12 in main, in backward"))
        rank 1 was killed by SIGKILL; last seen at train.py:12 in main, in backward
    """

    rank: int | None
    fate: str
    place: str = ""

    def __str__(self) -> str:
        who = "the host of the rendezvous store" if self.rank is None else f"rank {self.rank}"
        return f"{who} {self.fate}" + (f"; last seen at {self.place}" if self.place else "")


@dataclass
class _Peer:
    """A rank as its heartbeats show it."""

    beat: Mapping[str, Any] = field(default_factory=dict)
    changed: float = 0.0  # on this process's clock
    pidfd: int | None = None
    status: str = ""  # how its process ended

    @property
    def place(self) -> str:
        return str(self.beat.get("place", ""))

    def update(self, text: str, now: float) -> None:
        beat = json.loads(text)
        if beat != self.beat:
            self.beat, self.changed = beat, now


class Heartbeat:
    """Notes in the store that this rank lives, and watches the others.

    Args:
        store: of the process group.
        rank: of this process.
        world: number of ranks.
        timeout: seconds without a heartbeat after which a rank is lost.
        serves_store: True if rank 0 serves the store, and not a launcher.
        abort: aborts all groups of this process, after the loss of a rank; like the next one, it is
            called on the thread of the watch.
        abort_training: aborts all but those that save in the background, after an error of another
            rank; does nothing by default.

    Attributes:
        lost: the rank that was lost first, None so far.
        report: the error that another rank has published, None so far.

    Example:
        >>> import torch.distributed as dist
        >>> from accel_callbacks.collectives.store import BoundedStore
        >>> from accel_callbacks.distributed.heartbeat import Heartbeat
        >>> watch = Heartbeat(BoundedStore(dist.HashStore()), 0, 1, timeout=60, abort=print)
        >>> watch.start()
        >>> watch.stop()
        >>> watch.lost is None
        True
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        world: int,
        *,
        timeout: float,
        abort: Callable[[], None],
        abort_training: Callable[[], None] = lambda: None,
        serves_store: bool = True,
    ) -> None:
        self.lost: LostRank | None = None
        self.report: Mapping[str, Any] | None = None
        self._store, self._rank, self._world = store, rank, world
        self._timeout, self._serves_store = timeout, serves_store
        self._abort, self._abort_training = abort, abort_training
        self._interval = min(timeout / 10, _LONGEST_INTERVAL)
        self._trains, self._saves = threading.current_thread(), StuckCalls(is_saving)
        self._loads, self._saving, self._loading = StuckCalls(waits_for_worker), 0.0, 0.0
        self._peers = {peer: _Peer() for peer in range(world) if peer != rank}
        self._count, self._place, self._answered = 0, "", time.monotonic()
        self._main, self._wait = MainThread(self._trains), Wait()
        self._own: Mapping[str, Any] = {}  # heartbeat
        self._stopped, self._round_end = threading.Event(), threading.Condition()
        self._round, self._everyone = 0, False
        self._error: BaseException | None = None
        self._wake_read, self._wake_write = os.pipe()
        # A thread, and no process: it reads the frames of the others, and is stopped with them.
        self._thread = threading.Thread(target=self._watch, name="accel-heartbeat", daemon=True)
        # In a child of multiprocessing atexit does not run, and this does.
        self._at_exit = multiprocessing.util.Finalize(self, self.stop, exitpriority=100)

    def start(self) -> None:
        """Start the thread, after a first heartbeat: a rank that hangs from now on is missed."""
        self._observe()
        with suppress(dist.DistError):  # the watch judges a store that does not answer
            self._store.call(self._beat)
        self._thread.start()

    def follow_group(self) -> None:
        """Watch the default group, which the ranks have joined meanwhile."""
        global _current
        self._timeout = collectives.group_timeout().total_seconds()
        _current = self, ref(dist.group.WORLD)

    def absent(self) -> list[int]:
        """Return the ranks that have never noted a heartbeat; none if the store does not answer."""
        with suppress(dist.DistError):
            beats = self._store.read([f"{_BEAT}/{rank}" for rank in range(self._world)])
            return [rank for rank, beat in enumerate(beats) if beat is None]
        return []

    def stop(self, error: BaseException | None = None) -> None:
        """Note that this rank leaves the group, and why, and stop the thread; once only."""
        if self._stopped.is_set():
            return
        self._error = error
        self._stopped.set()
        os.write(self._wake_write, b"x")  # after it is set: the thread may sleep again before
        self._at_exit.cancel()
        if self._thread.is_alive():
            self._thread.join(self._store.patience + 1)
        if self._thread.is_alive():
            return  # it waits for a store that does not answer
        for number in (self._wake_read, self._wake_write, *self._pidfds()):
            os.close(number)

    def find_lost(self, error: BaseException) -> LostRank | None:
        """Return the rank whose loss has broken a collective; None if all live, or report an error.

        Wait for it up to a few seconds: a connection closes sooner than a heartbeat fails to come.

        Args:
            error: of the collective.
        """
        timed_out = self.timed_out(error)
        deadline = time.monotonic() + self._interval * (_MISSED + 1)
        while True:
            self._refresh(deadline)
            if self.report is not None:
                return None
            late = time.monotonic() > deadline
            lost = self.lost or self._first_to_leave()
            if lost is None and (timed_out or late):
                lost = self._silent(_MISSED * self._interval)
            if lost is None and late and self._store.is_gone and self._serves_store:
                lost = LostRank(0, "has ended (it served the store of the group)")
            if lost is not None or late or self._stopped.is_set():
                return lost
            time.sleep(0.02)

    def find_ended(self) -> LostRank | None:
        """Return a rank of this machine whose process has ended; None if there is none."""
        for rank, peer in self._peers.items():
            if peer.status:
                return LostRank(rank, peer.status, peer.place)
        return None

    @staticmethod
    def timed_out(error: BaseException) -> bool:
        """Return whether a collective has waited for its timeout."""
        return any("imed out" in str(cause) for cause in _chain(error))

    def find_gone(self, ranks: Iterable[int]) -> LostRank | None:
        """Return the first of some ranks that has ended or left the group, None if none has."""
        for rank in ranks:
            peer = self._peers.get(rank, _Peer())
            left = peer.beat.get("left")
            if peer.status or left is not None:
                return LostRank(rank, (peer.status or "has ended") + (left or ""), peer.place)
        return None

    def progress_of(self, ranks: Iterable[int]) -> dict[int, tuple[int, list[int]]]:
        """Return how far ranks are, see :func:`report_progress`, with the number of the heartbeat.

        What is known is up to two heartbeats old.
        """
        self._everyone = True  # of many ranks each reads few by itself
        beats = ((rank, self._peers[rank].beat) for rank in ranks)
        return {rank: (beat["count"], beat["progress"]) for rank, beat in beats if beat}

    def error_of(self, lost: LostRank, operation: str, place: str | None = None) -> LostRankError:
        """Return the error for a rank that was lost, which names what waited for it here.

        Args:
            lost: the rank.
            operation: what has failed.
            place: of the thread that trains; where it is now if None.
        """
        place = place_of_thread(self._trains) if place is None else place
        text = f"{lost}; this rank was at {place}" if place else str(lost)
        return LostRankError(text, rank=lost.rank, where=operation)

    def last_seen(self, ranks: list[int]) -> str:
        """Describe where ranks were last seen, for an error; empty if nothing is known."""
        seen = [(rank, self._peers[rank].place) for rank in ranks if rank in self._peers]
        texts = [f"rank {rank} was last seen at {place}" for rank, place in seen if place]
        more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        return "; ".join(texts[:_SHOWN]) + more

    # --- the thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Beat, read and judge, until the rank leaves or another one is lost."""
        before = time.monotonic()
        while not (self._stopped.is_set() or _outlives_group(self)):
            began = time.monotonic()
            if began - before > max(self._timeout / 2, 5 * self._interval):
                # This process itself was stopped, and heard nobody: all silences begin anew.
                self._answered = began
                for peer in self._peers.values():
                    peer.changed = began
            before = began
            self._observe()
            self._exchange()
            self._judge()
            self._end_loading()
            with self._round_end:
                self._round += 1
                self._round_end.notify_all()
            # Soon again until the first heartbeats of the others are there.
            unseen = any(not self._peers[rank].beat for rank in self._peers_to_read())
            self._sleep(self._interval / 10 if unseen else self._interval)
        self._sleep(0)  # to see whether the process that serves the store has ended first
        with suppress(Exception):
            self._store.call(lambda store: self._beat(store, left=_last_words(self._error)))

    def _observe(self) -> None:
        """Note where the threads of this process are."""
        calls = stacks()
        trains = calls.get(self._trains.ident or 0, ())
        self._place, self._wait = place_of(trains), self._main.observe(trains)
        self._saving, self._loading = self._saves.seconds(calls), self._loads.seconds(calls)

    def _exchange(self) -> None:
        """Note the heartbeat of this rank, and read those of others."""
        ranks, self._everyone = self._peers_to_read(), False
        asked = time.monotonic()  # not after the answer: this process may be stopped in between
        try:
            lost, report, *beats = self._store.call(lambda store: self._talk(store, ranks))
        except Exception:
            return  # a store that does not answer is judged by its silence, in _silent()
        now, self._answered = time.monotonic(), asked
        for rank, text in zip(ranks, beats, strict=True):
            if text is not None:
                self._peers[rank].update(text, now)
                self._open_process(self._peers[rank])
        if report is not None and self.report is None:
            self._follow(json.loads(report))
        if lost is not None and self.lost is None:
            self._lose(LostRank(**json.loads(lost)), known=True)

    def _follow(self, report: Mapping[str, Any]) -> None:
        """Keep the error that another rank has published, and abort what would not notice it."""
        if report["rank"] == self._rank:
            return
        self.report = report
        # gloo's collectives fail once that rank has closed its connections. NCCL's would wait for
        # their timeout.
        if _runs_on_device():
            # Before the abort, which lets the training thread go on.
            remote_failure.note(lambda operation: RemoteError(**report))
            self._abort_training()

    def _talk(self, store: Any, ranks: list[int]) -> list[str | None]:
        """Note this rank's heartbeat; return the loss, the report, and the heartbeats of ranks."""
        self._beat(store)
        rare = [store.get(key).decode() if store.check([key]) else None for key in (_LOST, REPORT)]
        return rare + read_keys(store, [f"{_BEAT}/{rank}" for rank in ranks])

    def _beat(self, store: Any, left: str | None = None) -> None:
        self._count += 1
        beat = {
            "count": self._count,
            "place": self._place,
            "process": [host_id(), os.getpid()],
            "left": left,
            "stuck": self._saving,
            "progress": list(_progress()),
            "wait": list(self._wait),
            "time": time.time(),
        }
        self._own = beat
        store.set(f"{_BEAT}/{self._rank}", json.dumps(beat))

    def _peers_to_read(self) -> list[int]:
        if self._everyone or self._world <= _READ_ALL:
            return list(self._peers)
        return sorted({0, (self._rank + 1) % self._world} & set(self._peers))

    def _open_process(self, peer: _Peer) -> None:
        """Begin to watch the process of a peer on this machine."""
        if sys.platform != "linux":  # no other system has pidfds
            return
        if peer.pidfd is None and not peer.status and peer.beat["process"][0] == host_id():
            with suppress(OSError, AttributeError):  # an old kernel or Python
                peer.pidfd = os.pidfd_open(peer.beat["process"][1])

    def _judge(self) -> None:
        """Find a rank that has died or is silent for too long."""
        if self.lost is not None:
            return
        for rank, peer in self._peers.items():
            # A rank that has said that it leaves may end.
            if peer.status and peer.beat["left"] is None:
                self._lose(LostRank(rank, peer.status, peer.place))
                return
            stuck = peer.beat.get("stuck", 0.0)
            if stuck > max(self._timeout, _LONGEST_CALL):
                fate = f"has been in one call of a save for {stuck:.0f} s (its storage hangs?)"
                self._lose(LostRank(rank, fate, peer.place))
                return
        silent = self._silent(self._timeout) or self._divergence()
        if silent is not None:
            self._lose(silent)

    def _divergence(self) -> LostRank | None:
        """Return a rank that waits for this one elsewhere, and will not come to where this is."""
        if not self._wait.collective:
            return None
        self._everyone = True
        # Certain only where all were heard of lately: an old heartbeat may be of another call.
        heard = self._answered - _MISSED * self._interval
        if not all(peer.beat and peer.changed >= heard for peer in self._peers.values()):
            return None
        beats = {rank: peer.beat for rank, peer in self._peers.items()}
        found = find_divergence(self._rank, {**beats, self._rank: self._own})
        return found and LostRank(*found, self._peers[found[0]].place)

    def _silent(self, limit: float) -> LostRank | None:
        """Return a rank that has not been heard of for some seconds."""
        silence = time.monotonic() - self._answered
        # A store that refuses has ended with its process, which is no hang.
        if self._store.is_silent and silence > limit:
            # A store of the launcher, or of this very process, says nothing about another rank.
            if not self._serves_store or self._rank == 0:
                return LostRank(None, f"has not answered for {silence:.0f} s")
            fate = f"(it serves the store of the group) has not answered for {silence:.0f} s"
            return LostRank(0, fate, self._peers[0].place)
        for rank in self._peers_to_read():
            peer = self._peers[rank]
            # Until the last answer of the store, and not until now: while the store is silent,
            # nothing could be heard of any rank.
            silence = self._answered - peer.changed
            if peer.beat and peer.beat["left"] is None and silence > limit:
                return LostRank(rank, f"has not answered for {silence:.0f} s", peer.place)
        return None

    def _first_to_leave(self, *, following: bool = False) -> LostRank | None:
        """Return the rank that left the group first, and not because of another one.

        Args:
            following: whether ranks that left because of another one count as well.
        """
        gone = [
            (peer.beat["time"], rank)
            for rank, peer in self._peers.items()
            if (left := peer.beat.get("left")) is not None
            and (following or not left.startswith(_FOLLOWS))
        ]
        if not gone:
            return None
        first = min(gone)[1]
        peer = self._peers[first]
        return LostRank(first, (peer.status or "has ended") + peer.beat["left"], peer.place)

    def _lose(self, lost: LostRank, known: bool = False) -> None:
        """Publish the loss of a rank, and abort what waits for a rank that hangs."""
        self.lost = lost
        text, first = json.dumps(vars(lost)), not known
        if not known:
            # The first loss counts: others mostly follow from it, and one rank prints it.
            with suppress(Exception):
                first = self._store.compare_set(_LOST, "", text).decode() == text
        peer = self._peers.get(-1 if lost.rank is None else lost.rank, _Peer())
        dumps = "" if peer.status else dump_hang(self._rank)  # before the abort
        if first and peer.status not in _ORDERLY:
            print(f"[accel] {lost}{dumps and f'.{dumps}'}", file=sys.stderr, flush=True)
        # gloo notices by itself that a process has ended; NCCL does not, and nothing notices one
        # that hangs.
        if lost.rank != self._rank and (_runs_on_device() or not peer.status):
            # Before the abort, which lets the training thread go on.
            place = place_of_thread(self._trains)
            remote_failure.note(lambda operation: self.error_of(lost, operation, place))
            self._abort()
            threading.Thread(target=self._end_process, name="accel-end", daemon=True).start()

    def _end_process(self) -> None:
        """End this process if it still waits in a call of torch that cannot be aborted."""
        limit, before = time.monotonic() + self._timeout / 2, list[Call]()
        while time.monotonic() < limit or call_of_torch(before):
            time.sleep(self._interval)
            if _current is not None and _current[0] is not self:
                return  # it has joined another group meanwhile
            now = stacks().get(self._trains.ident or 0, [])
            if time.monotonic() >= limit and call_of_torch(now) and now == before:
                text = f"[accel] {self.lost}: this process waits for it in a call of torch that "
                print(f"{text}cannot be aborted, and ends", file=sys.stderr)
                # Without lines of the source, whose file may be on a mount that hangs.
                print(*(f"  {call}" for call in reversed(now)), sep="\n", file=sys.stderr)
                sys.stderr.flush()
                # Not sys.exit: no exception reaches a thread inside of C++, and the exit of the
                # interpreter would wait for the same call.
                os._exit(1)
            before = now

    def _end_loading(self) -> None:
        """End the workers of a DataLoader that give no batch, after the loss of another rank.

        The thread that trains waits for them in no collective, so nothing else would end its wait.
        """
        # A rank that has said why it left counts too: its own store may be gone by now. So does one
        # that left because of another rank, which may be this one: it waited here for too long.
        lost, waited = self.lost or self._first_to_leave(following=True), self._loading
        if lost is None or waited < self._timeout / 2:
            return
        if lost.fate == "has ended" or lost.fate.startswith(_ORDERLY):
            return  # it had no more to train on, and this rank has
        stopped = stopped_workers(multiprocessing.active_children())
        state = (
            f" (stopped: process {', '.join(str(worker.pid) for worker in stopped)})"
            if stopped
            else ""
        )
        text = f"waited {waited:.0f} s for a batch of the DataLoader's workers{state}"
        print(f"[accel] {lost}; rank {self._rank} has {text}, and ends them", file=sys.stderr)
        place = f"{place_of_thread(self._trains)}, and had {text}"
        remote_failure.note(lambda operation: self.error_of(lost, operation, place))
        self._loading = 0.0
        end_workers(patience=0.0)

    # --- waiting --------------------------------------------------------------------------------

    def _sleep(self, seconds: float) -> None:
        """Sleep until the next round, a call of ``_wake``, or the end of a process."""
        if sys.platform == "win32":  # it has no poll
            self._stopped.wait(seconds)
            return
        poll, watched = select.poll(), self._pidfds()
        poll.register(self._wake_read, select.POLLIN)
        for number in watched:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(seconds * 1000):
            if number == self._wake_read:
                os.read(self._wake_read, 4096)
                continue
            peer = watched[number]
            peer.status, peer.pidfd = fate_of(int(peer.beat["process"][1]), number), None
            os.close(number)
            if peer is self._peers.get(0) and self._serves_store:
                self._store.is_gone = True  # the first call that finds out prints C++ frames

    def _pidfds(self) -> dict[int, _Peer]:
        return {peer.pidfd: peer for peer in self._peers.values() if peer.pidfd is not None}

    def _wake(self) -> None:
        if not self._stopped.is_set():  # after it the number may be that of another file
            os.write(self._wake_write, b"x")

    def _refresh(self, deadline: float) -> None:
        """Wait for a round of the watch that began after this call."""
        with self._round_end:
            target = self._round + 2  # the one in progress may have read before this call
            self._everyone = True
            while self._round < target and (left := deadline - time.monotonic()) > 0:
                self._wake()
                self._round_end.wait(min(left, 0.05))


# The heartbeat of the default group, and that group, None while the ranks join it. Global, as the
# default group is.
_current: tuple[Heartbeat, ReferenceType[Any] | None] | None = None


def current_heartbeat() -> Heartbeat | None:
    """Return the heartbeat of the default group, None without one."""
    if _current is None or _current[1] is None or not dist.is_initialized():
        return None
    return _current[0] if _current[1]() is dist.group.WORLD else None


# Returns how far the training of this process is, as numbers. Global, as the heartbeat is.
_progress: Callable[[], Iterable[int]] = tuple


def report_progress(progress: Callable[[], Iterable[int]]) -> None:
    """Set what heartbeats tell of this process; their thread calls it."""
    global _progress
    _progress = progress


def _outlives_group(watch: Heartbeat) -> bool:
    """Return whether the script has destroyed the group that a heartbeat is of."""
    known = _current is not None and _current[0] is watch and _current[1] is not None
    return known and current_heartbeat() is None


def _runs_on_device() -> bool:
    """Return whether the collectives of the default group run on a device, as NCCL's do."""
    group = collectives.default_group()
    return group is not None and collectives.has_device_backend(group)


def start_heartbeat(watch: Heartbeat) -> None:
    """Start a heartbeat in place of the one before; :meth:`Heartbeat.follow_group` is to follow."""
    global _current
    stop_heartbeat()
    _current = watch, None
    watch.start()


def stop_heartbeat(error: BaseException | None = None) -> None:
    """Stop the heartbeat, which tells the others an error; do nothing without one."""
    global _current
    watch, _current = _current, None
    if watch is not None:
        watch[0].stop(error)


def is_disconnect(error: BaseException) -> bool:
    """Return whether this error, or one in its chain, is what a broken collective raises.

    Example:
        >>> from accel_callbacks.distributed.heartbeat import is_disconnect
        >>> is_disconnect(RuntimeError("[gloo] Connection closed by peer"))
        True
        >>> is_disconnect(ValueError("no data"))
        False
    """
    return any(
        isinstance(cause, dist.DistError)
        or (isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in _SIGNS))
        for cause in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _last_words(error: BaseException | None) -> str:
    """Return what this process ends with: the error, or an uncaught one; "" for none."""
    error = getattr(sys, "last_value", None) if error is None else error
    if error is None or isinstance(error, SystemExit):
        return ""
    text = traceback.format_exception_only(type(error), error)[-1].strip()
    return f"{_FOLLOWS if is_disconnect(error) else _WITH}{text[:300]}"


# --- the error of another rank for which this process was aborted, until its training thread knows
# After an abort the kernels of NCCL end, and ``.item()`` and ``synchronize()`` return without an
# error. Only the next collective raises, so the training thread would step with gradients that were
# never summed. The watch notes the error here, and the calls of a training step look at it.


class RemoteFailure:
    """The error for which a watch has aborted this process.

    Attributes:
        pending: returns the error to raise in the method that it is given; None without an abort.
            The hot path reads only this attribute.
    """

    __slots__ = ("_group", "pending")

    def __init__(self) -> None:
        self.pending: Callable[[str], RemoteError] | None = None
        self._group: ReferenceType[Any] | None = None

    def note(self, error: Callable[[str], RemoteError]) -> None:
        """Note the error, of the default group; the first one counts.

        Called on the thread of a watch, before it aborts.

        Args:
            error: makes the error for the method that raises it.
        """
        group = default_group()
        if group is None or self._is_of(group):
            return
        self._group = ref(group)
        self.pending = error

    def forget(self) -> None:
        """Forget the error, because the training thread has one: what comes now follows from it."""
        group = default_group()
        self.pending, self._group = None, None if group is None else ref(group)

    def raise_in(self, method: str) -> None:
        """Raise the error, unless it is of a process group that is gone.

        Args:
            method: the public method that was called.

        Raises:
            RemoteError: another rank has failed, or was lost.
        """
        error = self.pending
        if error is None:
            return
        if not self._is_of(default_group()):
            self.pending = None
            return
        raise error(method)

    def _is_of(self, group: Any) -> bool:
        return group is not None and self._group is not None and self._group() is group


#: Of the default group. Global, as the default group is.
remote_failure = RemoteFailure()
