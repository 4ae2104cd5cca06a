"""An error that ends a run on one process ends it on all, and says there what it was."""

from __future__ import annotations

import atexit
import gc
import json
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel_callbacks.collectives import rank, store, world_size
from accel_callbacks.errors import RemoteError

__all__ = [
    "begin_again",
    "cut",
    "end_with",
    "finish_spared",
    "group_is_torn",
    "refuse_torn",
    "spare",
    "tear_group",
    "watch_others",
]

_REPORT, _ENDED, _GONE, _AGAIN = "failure", "ended", "gone", "again"  # at the store
_LONGEST_REPORT = 20_000  # characters; the end of a traceback is what counts
_LINGER = 5.0  # seconds that the process which keeps the store waits for its readers
_SILENCE = 30.0  # seconds that a save still waits for a process that neither answers nor reports
_LOOK_EVERY = 1.0  # seconds between looks at the store, where collectives run on a device
_UNUSED_TAG = 2**31 - 77
_SIGNS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "process group")

# The group that an error has broken; as much a fact of the process as the group itself.
_torn: weakref.ref[Any] | None = None
# Groups in which a save goes on while the run ends, and what waits for its end here.
_spared: weakref.WeakKeyDictionary[Any, Callable[[], None]] = weakref.WeakKeyDictionary()
_exit_hook_set = False
_has_readers = True  # others may want to read here what ended the run


def end_with(error: BaseException, where: str) -> BaseException:
    """Tell all processes of the error that ends the run here; returns the error to raise.

    The first error is published, then this process breaks its connections, so that nobody waits
    for it. A process that was thrown out of a collective this way finds the published error.

    Args:
        error: what ends the run on this process.
        where: what ended, for the error of the others.

    Returns:
        ``error``, or a :class:`RemoteError` where it only follows from another process's error.

    Example:
        >>> from accel_callbacks.distributed.abort import end_with
        >>> end_with(ValueError("no data"), "the run")
        ValueError('no data')
    """
    if world_size() == 1:
        return error
    global _has_readers
    remote, _has_readers = None, True
    told = isinstance(error, RemoteError)  # by the process that failed, which publishes its error
    with suppress(Exception):  # the store is gone with the process that kept it
        notes = store()
        if not told and _is_disconnect(error):
            remote = _report_of_another(notes)
            # A process that was killed tells nothing, and it is all that the others could read.
            _has_readers = remote is not None
            if remote is None:
                _limit_spared()
        if not told and remote is None and not group_is_torn():
            notes.compare_set(_REPORT, "", _encode(error, where))
    tear_group()
    with suppress(Exception):
        store().set(f"{_ENDED}/{rank()}", "")
    return remote or error


def group_is_torn() -> bool:
    """Whether the process group is of no more use, because an error ended a run in it.

    Example:
        >>> from accel_callbacks.distributed.abort import group_is_torn
        >>> group_is_torn()
        False
    """
    return _torn is not None and dist.is_initialized() and _torn() is dist.group.WORLD


def refuse_torn(action: str) -> None:
    """Say what to do instead of a collective that cannot work any more.

    Raises:
        RuntimeError: an error has ended a run in this process group.

    Example:
        >>> from accel_callbacks.distributed.abort import refuse_torn
        >>> refuse_torn("save_state")
    """
    if group_is_torn():
        raise RuntimeError(
            f"{action}: the processes have parted with the error that ended the run. Make a new "
            "Accelerator, and prepare anew, on all of them; or let the script end."
        )


def tear_group() -> None:
    """Make each collective that waits for this process fail on the others, now and later.

    Example:
        >>> from accel_callbacks.distributed.abort import tear_group
        >>> tear_group()
    """
    global _torn, _exit_hook_set
    if world_size() == 1 or group_is_torn():
        return
    _torn = weakref.ref(dist.group.WORLD)
    if not _exit_hook_set:
        atexit.register(_part_at_exit)
        _exit_hook_set = True
    for group in _groups():
        if group not in _spared:
            cut(group)


def spare(group: Any, until: Callable[[], None] | None) -> None:
    """Let what goes on in a group go on when an error ends the run; None for no longer.

    Args:
        group: a process group that a thread uses.
        until: waits for that thread.

    Example:
        >>> from accel_callbacks.distributed.abort import finish_spared, spare
        >>> group = frozenset({"stands for a group"})
        >>> spare(group, lambda: print("waited"))
        >>> finish_spared()
        waited
        >>> spare(group, None)
    """
    if until is None:
        _spared.pop(group, None)
    else:
        _spared[group] = until


def _limit_spared() -> None:
    """A machine that is cut off closes no connection, and never ends its part of a save."""
    for group in list(_spared):
        limit = threading.Timer(_SILENCE, _cut_if_silent, [group])
        limit.daemon = True
        limit.start()


def _cut_if_silent(group: Any) -> None:
    with suppress(Exception):
        # A process that was only slow has ended its run by now, and still does its part.
        if group not in _spared or store().check([f"{_ENDED}/{r}" for r in range(world_size())]):
            return
    cut(group)


def finish_spared() -> None:
    """Wait until nothing goes on in any group: they are about to be left."""
    for until in list(_spared.values()):
        until()


def cut(group: Any) -> None:
    """Make each collective of one group fail that waits for this process, now and later."""
    with suppress(Exception):
        _close_connections(group)
    with suppress(Exception):
        _abort_devices(group)


def _groups() -> list[Any]:
    known = getattr(dist.distributed_c10d, "_world", None)
    return list(known.pg_map) if known is not None else [dist.group.WORLD]


def _close_connections(group: Any) -> None:
    """A receive of gloo that times out closes all connections of its group, on both ends.

    Tried with each process, because a receive from one that is gone already does not wait.
    """
    for other in sorted({*dist.get_process_group_ranks(group)} - {rank()}):
        with suppress(RuntimeError):
            work = dist.irecv(torch.empty(1), other, group=group, tag=_UNUSED_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def _abort_devices(group: Any) -> None:
    """NCCL and its like."""
    for kind in group._device_types:
        if kind.type != "cpu":
            group._get_backend(kind).abort()


def _encode(error: BaseException, where: str) -> str:
    details = "".join(traceback.format_exception(error))[-_LONGEST_REPORT:]
    return json.dumps({"rank": rank(), "where": where, "details": details})


def _report_of_another(notes: dist.distributed_c10d.Store) -> RemoteError | None:
    """What another process has published; it does so before it breaks anything."""
    with suppress(dist.DistError):
        # A process between the failing one and this one may be faster than the report.
        notes.wait([_REPORT], timedelta(seconds=2))
        report = json.loads(notes.get(_REPORT))
        return RemoteError(**report) if report["rank"] != rank() else None
    return None


def _is_disconnect(error: BaseException) -> bool:
    """Whether this error, or one it was raised from, is what a broken collective raises."""
    return any(
        isinstance(one, dist.DistError)
        or (isinstance(one, RuntimeError) and any(sign in str(one) for sign in _SIGNS))
        for one in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _part_at_exit() -> None:
    """The others must not wait for a process that has ended, and want to read why."""
    if not group_is_torn():
        return
    with suppress(Exception):
        notes = store()
        notes.add(_GONE, 1)
        deadline = time.monotonic() + (_LINGER if rank() == 0 and _has_readers else 0)
        ended = [f"{_ENDED}/{one}" for one in range(world_size())]
        while not notes.check(ended) and time.monotonic() < deadline:
            time.sleep(0.05)


def watch_others() -> Callable[[], None]:
    """Where collectives run on a device: look out for errors of others; returns what ends it.

    gloo notices by itself that a connection is closed, NCCL waits for ever.
    """
    if all(kind.type == "cpu" for group in _groups() for kind in group._device_types):
        return lambda: None
    over = threading.Event()
    thread = threading.Thread(target=_look_out, args=(store(), over), daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    return stop


def _look_out(notes: dist.distributed_c10d.Store, over: threading.Event) -> None:
    """Break this process's connections too once another process has published an error."""
    while not over.wait(_LOOK_EVERY):
        with suppress(Exception):
            if notes.check([_REPORT]):
                tear_group()
                return


def begin_again(backend: str, timeout: timedelta | None) -> None:
    """After an error: leave the broken group and join a new one, with all processes.

    Args:
        backend: of the new group.
        timeout: of the new group, and how long to wait for the others; torch's default if None.

    Raises:
        RuntimeError: a process has ended instead, or does not come.
    """
    here, world = rank(), world_size()
    place = _meet_again(timeout or dist.distributed_c10d.default_pg_timeout)
    finish_spared()
    gc.collect()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=place, rank=here, world_size=world, timeout=timeout)


def _meet_again(timeout: timedelta) -> dist.distributed_c10d.Store:
    """Wait until all processes begin again; returns what the new group meets at."""
    deadline = time.monotonic() + timeout.total_seconds()
    advice = "start the script again, or let all processes end with the error"
    try:
        notes = store()
        here = notes.add(_AGAIN, 1)
        while here < world_size():
            if notes.add(_GONE, 0):
                raise RuntimeError(f"a process has ended with the error that ended a run: {advice}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {here} of {world_size()} processes begin again: {advice}")
            time.sleep(0.05)
            here = notes.add(_AGAIN, 0)
    except dist.DistError as error:
        raise RuntimeError(
            f"the process that keeps the others' meeting point has ended after an error: {advice}"
        ) from error
    return dist.distributed_c10d.PrefixStore(_AGAIN, notes)
