"""Saves on the training thread or in the background, in a process group of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import abort_connections, exempt_group
from accel_callbacks.distributed.heartbeat import is_disconnect
from accel_callbacks.logging import notice
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from checkpoint_io import BackgroundSaver, SaveJob

__all__ = [
    "BackgroundSaves",
    "SaveCallbacks",
    "SaveControl",
    "SaveGroup",
    "TrainingGroup",
    "check_when_busy",
    "is_dispensable",
]

# The other ranks wait in a collective while the slowest one writes.
_TIMEOUT = timedelta(hours=2)
# Idle gloo groups, by the default group that they belong to: making one is a collective, so it is
# used again, also by the next Accelerator.
_idle_groups: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


class _AllRanks:
    """Rank and world size of the default group."""

    @property
    def rank(self) -> int:
        """The rank."""
        return collectives.rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return collectives.world_size()


class SaveGroup(_AllRanks):
    """A process group for one save at a time, in the form that `checkpoint_io` takes.

    All ranks acquire and release it at the same places of the script. With one rank there is no
    group.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._idle: list[Any] = []  # the list that the group is returned to
        self._works = True

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather the object of every rank, in rank order."""
        return [obj] if self._group is None else self._call(collectives.exchange, obj, self._group)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``."""
        if self._group is None:
            return obj
        return self._call(collectives.send_object, obj, src, self._group)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor of the CPU to another rank, which receives it."""
        self._call(partial(dist.send, group=self._group), tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Receive a tensor of the CPU from another rank, into one of its size."""
        self._call(partial(dist.recv, group=self._group), tensor, rank)

    @collectives.explained("saving")
    def _call(self, collective: Callable[..., Any], *args: Any) -> Any:
        # A collective that raises leaves the group broken: it is not used again.
        self._works = False
        result = collective(*args)
        self._works = True
        return result

    def acquire(self) -> None:
        """Acquire a group; collective the first time."""
        if collectives.world_size() == 1:
            return
        self._idle = _idle_groups.setdefault(dist.group.WORLD, [])
        self._group = self._idle.pop() if self._idle else _new_group()

    def keep_through_abort(self, until: Callable[[], None]) -> None:
        """Exclude the group from an abort of the run, because a thread still saves in it.

        Args:
            until: waits for the thread.
        """
        if self._group is not None:
            exempt_group(self._group, until)

    def release(self) -> None:
        """Return the group, for the next save to use if it still works."""
        group = self._group
        if group is not None:
            exempt_group(group, None)
            if self._works:
                self._idle.append(group)
        self._group, self._works = None, True

    def close(self) -> None:
        """Close the group without a collective, so that no other rank blocks on this one."""
        if self._group is not None:
            self._works = False
            abort_connections(self._group)
        self.release()

    @contextmanager
    def acquired(self) -> Iterator[None]:
        """Acquire the group for a block that saves on this thread."""
        self.acquire()
        try:
            yield
        except Exception:
            # The outcome of a save is shared, so all ranks raise and release.
            self.release()
            raise
        except BaseException:
            # An interrupt is of this rank alone.
            self.close()
            raise
        self.release()


def _new_group() -> Any:
    # A rank that is gone fails this small collective at once; new_group would wait for it until
    # the timeout.
    collectives.any_process(False)
    return dist.new_group(timeout=_TIMEOUT, backend="gloo")


class TrainingGroup(_AllRanks):
    """The default group on the training thread, in the form that `checkpoint_io` takes."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather the object of every rank, in rank order."""
        return collectives.all_objects(obj, operation="saving")

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``."""
        return collectives.broadcast_object(obj, src)


class SaveControl(TrainingGroup):
    """The default group in which ranks agree on what to save and when.

    Args:
        group: for the thread that saves.
    """

    def __init__(self, group: SaveGroup) -> None:
        self._group = group

    def on_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank: one small all-reduce."""
        return collectives.any_process(flag)

    def beside(self) -> SaveGroup:
        """Return the group of the thread that saves."""
        return self._group


@dataclass(frozen=True)
class SaveCallbacks:
    """Functions to be called when a save ends.

    Args:
        on_saved: called with the path on all ranks once the checkpoint is durable, at a step
            boundary; the hook ``on_checkpoint_saved`` fires after it, if ``announced``.
        on_failed: called instead with the error of a save in the background; the error is raised
            unless this returns True.
        cleanup: called on the thread that saves once the checkpoint is durable, on each rank; its
            error is a warning. For slow work, such as the removal of older checkpoints.
        announced: fire ``on_checkpoint_saved``; not for what only a restart may read.
    """

    on_saved: Callable[[str], None] | None = None
    on_failed: Callable[[BaseException], bool] | None = None
    cleanup: Callable[[], None] | None = None
    announced: bool = True


class BackgroundSaves:
    """Runs saves, at most one in the background, whose end all ranks observe at the same place.

    Args:
        fire: calls a hook of all callbacks.

    Attributes:
        pending: True while a save is in progress or its end was not observed yet; the same on all
            ranks.
        control: the group in which ranks agree before they save.
    """

    def __init__(self, fire: Callable[..., None]) -> None:
        self._fire = fire
        self._reset()

    def _reset(self) -> None:
        self.pending = False
        self._group = SaveGroup()
        self.control = SaveControl(self._group)
        self._saver: BackgroundSaver | None = None
        self._url, self._callbacks = "", SaveCallbacks()

    def make_room(self, when_busy: str = "wait") -> bool:
        """Collective while a save is pending: return whether another one may start.

        Args:
            when_busy: ``"wait"`` for the pending save, or ``"skip"`` to return False.

        Raises:
            checkpoint_io.CheckpointError: the pending save has failed.
        """
        if not self.pending:
            return True
        saver = self._background()
        return self._observe(lambda: saver.make_room(when_busy))

    def run_now(self, job: SaveJob, callbacks: SaveCallbacks) -> None:
        """Collective: write on this thread, and fire ``on_checkpoint_saved``.

        Raises:
            checkpoint_io.CheckpointError: it failed, or an earlier one in the background had.
        """
        self.wait()
        with self._group.acquired():
            job.run(self._group)
            _clean_up(callbacks.cleanup)
        self._announce(job.url, callbacks)

    def start(self, job: SaveJob, callbacks: SaveCallbacks) -> None:
        """Collective: copy the tensors to host memory, and write them while training goes on.

        Args:
            job: the save.
            callbacks: called when it ends.

        Raises:
            checkpoint_io.CheckpointError: the save before has failed, or there is no memory.
        """
        self.wait()
        # Here and not in the thread: to make a group is a collective of the training threads.
        self._group.acquire()
        try:
            handle = self._background().submit(job, afterwards=lambda: _clean_up(callbacks.cleanup))
        except BaseException:
            self._group.release()
            raise
        assert handle is not None
        self._group.keep_through_abort(handle.join)
        self._url, self._callbacks, self.pending = job.url, callbacks, True

    def reserve(self, nbytes: int) -> None:
        """Take host memory for the first save in the background; return at once.

        Args:
            nbytes: about how many bytes of tensors this rank will write.
        """
        self._background().reserve(nbytes)

    def poll(self) -> None:
        """Collective while a save is pending: observe its end, if it has ended on all ranks.

        Raises:
            checkpoint_io.CheckpointError: it failed; raised on all ranks by the same call.
        """
        if self.pending:
            self._observe(self._background().poll)

    def wait(self) -> None:
        """Collective while a save is pending: wait for its end.

        Raises:
            checkpoint_io.CheckpointError: it failed.
        """
        if self.pending:
            saver = self._background()
            self._observe(lambda: saver.make_room("wait"))

    def abandon(self) -> None:
        """Wait for a pending save without a collective, because the run has failed.

        Print its outcome on rank 0, or warn where it failed; fire no hook.
        """
        if not self.pending:
            return
        handle, url = self._background().abandon(), self._url
        group = self._group
        assert handle is not None
        try:
            if not handle.ended(1.0):
                notice(f"waiting for the save to {url} to end")
            error = handle.exception()
        except KeyboardInterrupt:
            notice(f"the save to {url} goes on until the process ends")
            return
        finally:
            # After an interrupt the thread still uses its group and its copies: leave them to it.
            self._reset()
        group.close()
        if error is not None:
            problem = f"{type(error).__name__}: {error}"
            warn(f"the save that was under way failed: {problem}")
        else:
            notice(f"the save that was under way has ended well: {url}")

    def free_memory(self) -> None:
        """Free the host memory of the copies, unless a save uses it."""
        if self._saver is not None:
            self._saver.free_memory()

    def _background(self) -> BackgroundSaver:
        if self._saver is None:
            import checkpoint_io

            self._saver = checkpoint_io.BackgroundSaver(group=self.control)
        return self._saver

    def _observe(self, ask: Callable[[], bool]) -> bool:
        """Ask the saver whether the save has ended, and call what follows; return the answer."""
        url, callbacks = self._url, self._callbacks
        try:
            ended = ask()
        except BaseException as error:
            # If it is still pending, only the wait was interrupted.
            if not self._background().pending:
                self._finish()
                if callbacks.on_failed is not None and callbacks.on_failed(error):
                    return True
            raise
        if ended:
            self._finish()
            self._announce(url, callbacks)
        return ended

    def _finish(self) -> None:
        self._callbacks, self.pending = SaveCallbacks(), False
        self._group.release()

    def _announce(self, url: str, callbacks: SaveCallbacks) -> None:
        """Call what follows a durable checkpoint."""
        if callbacks.on_saved is not None:
            callbacks.on_saved(url)
        if callbacks.announced:
            self._fire("on_checkpoint_saved", url)


def check_when_busy(when_busy: str) -> None:
    """Raise ValueError unless ``when_busy`` is ``"wait"`` or ``"skip"``."""
    if when_busy not in ("wait", "skip"):
        raise ValueError(f"when_busy={when_busy!r} is unknown; use 'wait' or 'skip'.")


def is_dispensable(error: BaseException) -> bool:
    """Return whether training may go on without a checkpoint, by the error of its save."""
    from checkpoint_io import CheckpointError, LeaseError, UnsupportedStateError

    # A state that is unsupported now will not be saved later either, and another run that has the
    # folder keeps it. In a collective that has broken here other ranks may still wait: only the end
    # of the run closes their connections too.
    lasting = isinstance(error, (UnsupportedStateError, LeaseError)) or is_disconnect(error)
    return isinstance(error, CheckpointError) and not lasting


def _clean_up(cleanup: Callable[[], None] | None) -> None:
    """Call the cleanup; warn of its error, because the checkpoint is durable already."""
    try:
        if cleanup is not None:
            cleanup()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        warn(f"tidying up after a save failed: {problem}")
