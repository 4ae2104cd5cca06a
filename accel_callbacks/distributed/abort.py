"""Abort the run on all ranks if an error ends it on one, and report there which error it was.

torch alone leaves the other ranks in their collective until the timeout, 30 minutes by default.
Here the failing rank publishes its error in the store of the group and then closes its connections.
The collectives of the other ranks fail at once, and these ranks find the published error.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from accel_callbacks.collectives import BoundedStore, has_peers, rank, store, world_size
from accel_callbacks.distributed.heartbeat import (
    REPORT,
    Heartbeat,
    current_heartbeat,
    is_disconnect,
    remote_failure,
    start_heartbeat,
    stop_heartbeat,
)
from accel_callbacks.distributed.stack import dump_hang
from accel_callbacks.errors import DistributedOperationException, LostRankError, RemoteError
from accel_callbacks.errors.text import published_text

__all__ = [
    "abort_all_groups",
    "abort_connections",
    "abort_devices",
    "abort_group",
    "abort_run",
    "end_daemon_threads",
    "exempt_group",
    "explain",
    "explain_in_place",
    "group_is_aborted",
    "leave_aborted_group",
    "refuse_aborted_group",
    "register_daemon_thread",
    "wait_for_exempt_groups",
    "watch_ranks",
]

# Keys in the store of the group. REPORT holds the first error as JSON; "ended/{rank}" is set by
# each rank whose run has ended; "gone" counts the ranks whose process exits after an error;
# "again" counts the ranks that join a new group, and is the prefix of that group's own keys.
_ENDED, _GONE, _AGAIN = "ended", "gone", "again"
_LONGEST_REPORT = 20_000  # characters; a longer traceback loses its beginning
_LINGER = 5.0  # seconds that rank 0, which serves the store, waits at exit for its readers
_ABORT_TIMEOUT = 10.0  # seconds that an abort of device collectives may take
_UNUSED_TAG = 2**31 - 77
_EXPLAINED = "_accel_explained"  # attribute of an error for which no cause was found

# The default group that was aborted. Global, as the default group is.
_aborted: weakref.ref[Any] | None = None
# Groups that stay open while the run is aborted, with a function that waits until they are unused.
_exempt: weakref.WeakKeyDictionary[Any, Callable[[], None]] = weakref.WeakKeyDictionary()
_has_readers = True  # False if the published error tells the other ranks nothing new


def abort_run(error: BaseException, operation: str) -> BaseException:
    """Abort the run on all ranks because of an error on this one; return the error to raise.

    The error is published first, then this rank closes its connections, so that no rank waits for
    it. A rank whose collective fails this way finds the published error.

    Args:
        error: the error that ends the run on this rank.
        operation: what ended, for the error on the other ranks.

    Returns:
        ``error``, or a :class:`RemoteError` if it is only a consequence of another rank's error.
    """
    remote_failure.forget()  # the training thread has an error already
    if not has_peers():
        return error
    global _has_readers
    # A rank that was killed has published nothing, and this rank can only publish the disconnect
    # that all the others see themselves: no reason to linger for readers.
    cause = explain(error, operation)
    lost = isinstance(cause, LostRankError)
    _has_readers = not lost and (isinstance(cause, RemoteError) or not is_disconnect(error))
    with suppress(Exception):  # the store is gone if rank 0 is
        # A RemoteError came from a rank that publishes its error itself.
        if not isinstance(cause, RemoteError) and not group_is_aborted():
            # compare_set, because the first error counts: later ones mostly follow from it.
            store().compare_set(REPORT, "", _encode(error, operation))
    abort_group()
    # Rank 0, which serves the store, lingers at exit until all have set this.
    with suppress(Exception):
        store().set(f"{_ENDED}/{rank()}", "")
    return cause


def explain(error: BaseException, operation: str) -> BaseException:
    """Return the error that one of a collective follows from, or that error itself.

    Args:
        error: what this rank caught.
        operation: what has failed, for the message.

    Returns:
        A :class:`RemoteError` with the error that another rank has published, a
        :class:`LostRankError` that names a rank which died or hangs, a RuntimeError that says
        where the others are if they live but one did not come or went, or ``error``.
    """
    known = isinstance(error, (RemoteError, DistributedOperationException))
    if not has_peers() or known or not is_disconnect(error) or hasattr(error, _EXPLAINED):
        return error
    watch = current_heartbeat()
    if watch is None:
        return _wait_for_report() or error
    lost = watch.find_lost(error)
    if watch.report is not None:
        return RemoteError(**watch.report)
    if lost is not None:
        return watch.error_of(lost, operation)
    others = watch.last_seen([peer for peer in range(world_size()) if peer != rank()])
    cause: BaseException = error
    if watch.timed_out(error):
        cause = RuntimeError(
            f"{operation}: all ranks live, but one did not come within the timeout of the process "
            f"group: {others}. Check what it does there, or give it longer with "
            f"Accelerator(timeout=...).{dump_hang(rank())}"
        )
    elif others:
        cause = RuntimeError(
            f"{operation}: another rank closed its connection and is still alive, probably because "
            f"its own wait timed out: {others}. Check whether all ranks make the same calls.\n\n"
            f"The collective ended with: {error}"
        )
    setattr(cause, _EXPLAINED, True)  # not to be looked for again
    return cause


def explain_in_place(error: BaseException, operation: str) -> None:
    """Put the error that :func:`explain` returns into the message of this one.

    For an error that somebody else raises.
    """
    cause = explain(error, operation)
    if cause is not error:
        error.args = (f"{cause}\n\nThe collective ended with: {error}",)
        if hasattr(cause, _EXPLAINED):
            setattr(error, _EXPLAINED, True)


def _wait_for_report() -> RemoteError | None:
    """Return the error that another rank has published, None without one.

    A rank publishes before it aborts, but the disconnect may have come from a third rank in
    between, faster than the report.
    """
    deadline = time.monotonic() + 2
    with suppress(Exception):  # the store is gone if rank 0 is
        while not store().check([REPORT]) and time.monotonic() < deadline:
            time.sleep(0.05)
        report = json.loads(store().get(REPORT)) if store().check([REPORT]) else None
        if report is not None and report["rank"] != rank():
            return RemoteError(**report)
    return None


def _encode(error: BaseException, operation: str) -> str:
    details = published_text(error)[-_LONGEST_REPORT:]
    return json.dumps({"rank": rank(), "where": operation, "details": details})


def group_is_aborted() -> bool:
    """Return whether an error has aborted the default process group."""
    return _aborted is not None and dist.is_initialized() and _aborted() is dist.group.WORLD


def refuse_aborted_group(action: str) -> None:
    """Raise if the default process group was aborted, naming what to do instead of ``action``.

    Raises:
        RemoteError: the error of another rank has, and this thread has not raised it yet.
        RuntimeError: an error has aborted the process group.
    """
    remote_failure.raise_in(action)
    if group_is_aborted():
        raise RuntimeError(
            f"{action}: the error that ended the run has aborted the process group. Make a new "
            "Accelerator, and prepare again, on all processes; or let the script end."
        )


def abort_group() -> None:
    """Make every collective that waits for this rank fail on the other ranks, now and later."""
    global _aborted
    if not has_peers() or group_is_aborted():
        return
    # Noted first: the thread that trains may go on as soon as a connection is closed.
    _aborted = weakref.ref(dist.group.WORLD)
    _set_exit_hook()
    _abort([group for group in _groups() if group not in _exempt])


def abort_all_groups() -> None:
    """Abort the run, and what saves in the background too: a rank that they wait for hangs."""
    abort_group()
    _abort(list(_exempt))


def _groups() -> list[Any]:
    """Return all groups of this process, the newest first, as torch aborts them."""
    known = getattr(dist.distributed_c10d, "_world", None)
    return list(known.pg_map)[::-1] if known is not None else [dist.group.WORLD]


@functools.cache  # once a process
def _set_exit_hook() -> None:
    atexit.register(_linger_at_exit)


def _linger_at_exit() -> None:
    """Count this rank as gone, and keep the store up until the other ranks have read the error.

    Rank 0 serves the store. If its process ended at once, the others would find no reason for
    their failed collective.
    """
    if not group_is_aborted():
        return
    with suppress(Exception):
        notes = store()
        notes.add(_GONE, 1)
        deadline = time.monotonic() + (_LINGER if rank() == 0 and _has_readers else 0)
        ended = [f"{_ENDED}/{peer}" for peer in range(world_size())]
        while not notes.check(ended) and time.monotonic() < deadline:
            time.sleep(0.05)


def abort_connections(group: Any) -> None:
    """Make every collective of one group that waits for this rank fail, now and later."""
    _abort([group])


def _abort(groups: list[Any]) -> None:
    # gloo first: it takes milliseconds, and what aborts on a device may hang.
    for group in groups:
        with suppress(Exception):
            _close_connections(group)
    abort_devices(groups)


def _close_connections(group: Any) -> None:
    """Close the gloo connections of a group, on both ends, by a receive that times out.

    gloo has no abort, but a receive that times out closes all pairs of its group. It is tried with
    every rank, because a receive from a rank that is gone already fails without a timeout.
    """
    for other in sorted({*dist.get_process_group_ranks(group)} - {rank()}):
        with suppress(RuntimeError):
            nothing = torch.empty(1, device="cpu")  # not the script's default device
            work = dist.irecv(nothing, other, group=group, tag=_UNUSED_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def abort_devices(groups: Iterable[Any] | None = None) -> bool:
    """Abort the communicators of NCCL and of other device backends; return whether that ended.

    It is done on a thread: NCCL's abort may wait for ranks of the same machine that do not abort,
    and hooks, trackers and the end of this process are not to wait with it.

    Args:
        groups: the process groups; all if None.
    """
    backends: list[Any] = []
    for group in _groups() if groups is None else groups:
        with suppress(Exception):
            kinds = [kind for kind in group._device_types if kind.type != "cpu"]
            for backend in (group._get_backend(kind) for kind in kinds):
                if not any(backend is known for known in backends):
                    backends.append(backend)
    if not backends:
        return True
    thread = threading.Thread(target=_abort_backends, args=(backends,), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and starts no thread any more
        _abort_backends(backends)
        return True
    thread.join(_ABORT_TIMEOUT)
    if thread.is_alive():
        print(
            f"[accel] the abort of the device's collectives has not ended within "
            f"{_ABORT_TIMEOUT:.0f} s; going on without it",
            file=sys.stderr,
            flush=True,
        )
    return not thread.is_alive()


def _abort_backends(backends: list[Any]) -> None:
    with _together(backends):
        for backend in backends:
            with suppress(Exception):  # gloo on a device has none
                backend.abort()


@contextmanager
def _together(backends: list[Any]) -> Iterator[None]:
    """Context manager: abort several communicators of NCCL as one group.

    Aborts of different communicators, one after the other, may wait for each other on the ranks;
    `torch.distributed.distributed_c10d._abort_process_group` groups them for the same reason.
    """
    nccl = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if nccl is None or not hasattr(nccl, "_group_end"):  # another backend, or another torch
        yield
        return
    nccl._group_start()
    try:
        yield
    finally:
        nccl._group_end()


def exempt_group(group: Any, until: Callable[[], None] | None) -> None:
    """Exempt a group from an abort of the run; ``None`` ends the exemption.

    A background save keeps its group this way, and is completed although the run has failed.

    Args:
        group: a process group that a thread uses.
        until: blocks until that thread has finished.

    Example:
        >>> from accel_callbacks.distributed.abort import exempt_group, wait_for_exempt_groups
        >>> group = frozenset({"stands for a group"})
        >>> exempt_group(group, lambda: print("waited"))
        >>> wait_for_exempt_groups()
        waited
        >>> exempt_group(group, None)
    """
    if until is None:
        _exempt.pop(group, None)
    else:
        _exempt[group] = until


def wait_for_exempt_groups() -> None:
    """Block until all exempt groups are unused, because they are about to be destroyed."""
    for until in list(_exempt.values()):
        until()


def watch_ranks(
    store: BoundedStore, rank: int, world: int, *, timeout: float, serves_store: bool
) -> Heartbeat:
    """Start the heartbeat of this process, which aborts it where another rank fails or is lost.

    Args:
        store: of the group.
        rank: of this process.
        world: number of ranks.
        timeout: seconds without a heartbeat after which a rank is lost.
        serves_store: True if rank 0 serves the store, and not a launcher.
    """
    watch = Heartbeat(
        store,
        rank,
        world,
        timeout=timeout,
        abort=abort_all_groups,
        abort_training=abort_group,
        serves_store=serves_store,
    )
    start_heartbeat(watch)
    return watch


def leave_aborted_group(timeout: timedelta | None) -> dist.distributed_c10d.Store:
    """Destroy the aborted group, together with all ranks; return the store of a new one.

    Args:
        timeout: how long to wait for the other ranks; torch's default if None.

    Raises:
        RuntimeError: a process has ended instead, or does not join in time.
    """
    # Before the destruction: the ranks are counted in the store of the old group.
    new_store = _wait_for_all(timeout or dist.distributed_c10d.default_pg_timeout)
    stop_heartbeat()
    wait_for_exempt_groups()
    gc.collect()  # DDP's reducers must go before the group that they belong to
    dist.destroy_process_group()
    return new_store


def _wait_for_all(timeout: timedelta) -> dist.distributed_c10d.Store:
    """Block until all ranks rejoin; return the store of the new group."""
    deadline = time.monotonic() + timeout.total_seconds()
    advice = "start the script again, or let all processes end with the error"
    try:
        notes = store()
        rejoined = notes.add(_AGAIN, 1)
        watch = current_heartbeat()
        while rejoined < world_size():
            ended = watch.find_ended() if watch is not None else None
            if notes.add(_GONE, 0):  # adding 0 reads a counter that may not exist yet
                raise RuntimeError(f"a process has ended with the error that ended a run: {advice}")
            if ended is not None:
                raise RuntimeError(f"{ended}, and does not rejoin: {advice}")
            if time.monotonic() > deadline:
                missing = f"only {rejoined} of {world_size()} processes have rejoined"
                raise RuntimeError(f"{missing}: {advice}")
            time.sleep(0.05)
            rejoined = notes.add(_AGAIN, 0)
    except dist.DistError as error:
        raise RuntimeError(
            f"rank 0, which serves the rendezvous store, has ended after an error: {advice}"
        ) from error
    # A prefix within the old group's store, so that the new group reads no address of the old one.
    return dist.distributed_c10d.PrefixStore(_AGAIN, dist.distributed_c10d._get_default_store())


# --- daemon threads that train: ended in order before the interpreter ends -----------------------
# The interpreter ends a daemon thread wherever it is, by unwinding its stack. In a call of torch,
# such as a backward or a collective, that aborts the whole process.

_EXIT_PATIENCE = 5.0  # seconds for a thread to end, which it does at its next line of Python
_threads: WeakSet[threading.Thread] = WeakSet()


def register_daemon_thread() -> None:
    """End the current thread in order when the process exits, if it is a daemon."""
    thread = threading.current_thread()
    if not thread.daemon or thread in _threads:
        return
    _threads.add(thread)
    _end_threads_at_exit()


@functools.cache  # once a process
def _end_threads_at_exit() -> None:
    atexit.register(end_daemon_threads)


def end_daemon_threads() -> None:
    """Raise SystemExit in the daemon threads that train, and wait a few seconds for their end.

    Collectives in which they wait for other ranks are aborted.
    """
    alive = [thread for thread in list(_threads) if thread.is_alive()]
    for thread in alive:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
    # After the exceptions are set: a thread in a collective sees its own only once that has failed.
    if alive:
        abort_all_groups()
    deadline = time.monotonic() + _EXIT_PATIENCE
    for thread in alive:
        thread.join(max(0.0, deadline - time.monotonic()))
