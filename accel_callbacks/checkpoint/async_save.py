"""Saves now or on a thread, in a group of their own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import cut, spare

if TYPE_CHECKING:
    from checkpoint_io import BackgroundSaver, SaveJob

__all__ = ["BackgroundSaves", "SavingControl", "SavingLane", "Then", "check_when_busy"]

_TIMEOUT = timedelta(hours=2)  # others wait while the slowest process writes
# Groups of gloo that no save uses now, by the default group to which they belong: making one is
# a meeting of all processes, so one that is there is used again, by the next Accelerator too.
_idle: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


class _AllProcesses:
    """The members of both groups."""

    @property
    def rank(self) -> int:
        """This process's index, from 0."""
        return collectives.rank()

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return collectives.world_size()


class SavingLane(_AllProcesses):
    """A process group for one save at a time, as the checkpoint layer wants it.

    Processes take it and leave it at the same places of the script. With one process there is no
    group, and nothing to take.

    Example:
        >>> from accel_callbacks.checkpoint.async_save import SavingLane
        >>> lane = SavingLane()
        >>> with lane.taken():
        ...     lane.all_gather_object("here")
        ['here']
    """

    def __init__(self) -> None:
        self._process_group: Any = None
        self._group: Any = None
        self._home: list[Any] = []  # where the group goes back to
        self._works = True

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every process's object, in rank order."""
        return [obj] if self._group is None else self._meet(self._group.all_gather_object, obj)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """The object of process ``src``."""
        return obj if self._group is None else self._meet(self._group.broadcast_object, obj, src)

    def _meet(self, collective: Callable[..., Any], *args: Any) -> Any:
        self._works = False
        result = collective(*args)
        self._works = True
        return result

    def take(self) -> None:
        """Collective the first time: have a group of its own from here on."""
        if collectives.world_size() == 1:
            return
        import checkpoint_io

        self._home = _idle.setdefault(dist.group.WORLD, [])
        group = self._home.pop() if self._home else _new_group()
        self._process_group, self._group = group, checkpoint_io.TorchGroup(group)

    def spare(self, until: Callable[[], None]) -> None:
        """A thread uses it, which goes on where an error ends the run; ``until`` waits for it."""
        if self._process_group is not None:
            spare(self._process_group, until)

    def leave(self) -> None:
        """Give the group back, for the next save to use if it still works."""
        group = self._process_group
        if group is not None:
            spare(group, None)
            if self._works:
                self._home.append(group)
        self._process_group, self._group, self._works = None, None, True

    def close(self) -> None:
        """Leave without meeting the others: nobody is to wait for this process in the group."""
        if self._process_group is not None:
            self._works = False
            cut(self._process_group)
        self.leave()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A block for a save on this thread."""
        self.take()
        try:
            yield
        except Exception:  # known to all: they have left too
            self.leave()
            raise
        except BaseException:
            self.close()
            raise
        self.leave()


def _new_group() -> Any:
    collectives.any_process(False)  # a new group would wait for one that is gone until its timeout
    return dist.new_group(timeout=_TIMEOUT, backend="gloo")


class SavingControl(_AllProcesses):
    """All processes on the training thread: where they agree on what to save, and when.

    Args:
        lane: for the thread that saves.

    Example:
        >>> from accel_callbacks.checkpoint.async_save import SavingControl, SavingLane
        >>> SavingControl(SavingLane()).on_any(True)
        True
    """

    def __init__(self, lane: SavingLane) -> None:
        self._lane = lane

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every process's object, in rank order."""
        return collectives.all_objects(obj, operation="saving")

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """The object of process ``src``."""
        return collectives.broadcast_object(obj, src)

    def on_any(self, flag: bool) -> bool:
        """Whether it is so on any process: one small all-reduce."""
        return collectives.any_process(flag)

    def beside(self) -> SavingLane:
        """What the thread that saves meets in."""
        return self._lane


@dataclass(frozen=True)
class Then:
    """What follows a save.

    Args:
        saved: called with the path on all processes once the checkpoint is durable, at a step
            boundary; the hook ``on_checkpoint_saved`` fires after it.
        failed: called instead with the error if it failed in the background; the error is raised,
            unless this returns True.
        tidy: called on the thread that saves once the checkpoint is durable, on each process; its
            error is a warning. For what takes long, such as the removal of older ones.

    Example:
        >>> from accel_callbacks.checkpoint.async_save import Then
        >>> Then(saved=print).failed is None
        True
    """

    saved: Callable[[str], None] | None = None
    failed: Callable[[BaseException], bool] | None = None
    tidy: Callable[[], None] | None = None


class BackgroundSaves:
    """At most one save under way, whose end all processes learn of at the same place.

    Args:
        fire: calls a hook of all callbacks.

    Attributes:
        pending: a save is under way, or its end was not learned of yet; the same on all processes.

    Example:
        >>> from accel_callbacks.checkpoint.async_save import BackgroundSaves
        >>> saves = BackgroundSaves(fire=print)
        >>> saves.poll()
        >>> saves.pending
        False
    """

    def __init__(self, fire: Callable[..., None]) -> None:
        self._fire = fire
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.pending = False
        self._lane = SavingLane()
        self._control = SavingControl(self._lane)
        self._saver: BackgroundSaver | None = None
        self._url, self._then = "", Then()

    @property
    def control(self) -> SavingControl:
        """Where processes agree before they save."""
        return self._control

    def make_room(self, when_busy: str = "wait") -> bool:
        """Collective while a save is pending: whether another may begin, now or after a wait.

        Args:
            when_busy: ``"wait"``, or ``"skip"`` to be told False while a save is under way.

        Raises:
            ValueError: another value.
            checkpoint_io.CheckpointError: the save before has failed.
        """
        check_when_busy(when_busy)
        if not self.pending:
            return True
        saver = self._the_saver()
        return self._learn(lambda: saver.make_room(when_busy))

    def run_now(self, job: SaveJob, then: Then) -> None:
        """Collective: write on this thread, and tell the callbacks.

        Raises:
            checkpoint_io.CheckpointError: it failed, or an earlier one in the background had.
        """
        self.wait()
        with self._lane.taken():
            job.run(self._lane)
            _gently(then.tidy)
        self._tell(job.url, then)

    def start(self, job: SaveJob, then: Then) -> None:
        """Collective: copy the job's tensors to host memory, and write them while training goes on.

        Args:
            job: what to save.
            then: what follows.

        Raises:
            checkpoint_io.CheckpointError: the save before has failed, or there is no memory.
        """
        self.wait()
        self._lane.take()
        try:
            handle = self._the_saver().submit(job, afterwards=lambda: _gently(then.tidy))
        except BaseException:
            self._lane.leave()
            raise
        assert handle is not None
        self._lane.spare(handle.join)
        self._url, self._then, self.pending = job.url, then, True

    def poll(self) -> None:
        """Collective while a save is pending: learn of its end, if it has ended on all processes.

        Raises:
            checkpoint_io.CheckpointError: it failed; on all processes by the same call.
        """
        if self.pending:
            self._learn(self._the_saver().poll)

    def wait(self) -> None:
        """Collective while a save is pending: wait for its end.

        Raises:
            checkpoint_io.CheckpointError: it failed.
        """
        if self.pending:
            saver = self._the_saver()
            self._learn(lambda: saver.make_room("wait"))

    def abandon(self) -> None:
        """The run ends with an error: let the save under way end, without meeting the others.

        How it ended is said, on the main process or where it failed; no hook is called.
        """
        if not self.pending:
            return
        handle, url, rank = self._the_saver().abandon(), self._url, self._control.rank
        lane = self._lane
        assert handle is not None
        try:
            if not handle.ended(1.0):
                _say(f"waiting for the save to {url} to end", rank)
            error = handle.exception()
        except KeyboardInterrupt:
            _say(f"the save to {url} goes on until the process ends", rank)
            return
        finally:
            self._begin_anew()  # an interrupted one still uses its group and its copies
        lane.close()
        if error is not None:
            problem = f"{type(error).__name__}: {error}"
            warnings.warn(f"the save that was under way failed: {problem}", stacklevel=3)
        else:
            _say(f"the save that was under way has ended well: {url}", rank)

    def free_memory(self) -> None:
        """Give the host memory of the copies back, unless a save uses it."""
        if self._saver is not None:
            self._saver.free_memory()

    # --- inside -------------------------------------------------------------------------------

    def _the_saver(self) -> BackgroundSaver:
        if self._saver is None:
            import checkpoint_io

            self._saver = checkpoint_io.BackgroundSaver(group=self._control)
        return self._saver

    def _learn(self, ask: Callable[[], bool]) -> bool:
        """Ask the saver, and do what follows if the save has ended; False if it has not."""
        url, then = self._url, self._then
        try:
            ended = ask()
        except BaseException as error:
            if not self._the_saver().pending:  # else only the wait was interrupted
                self._is_over()
                if then.failed is not None and then.failed(error):
                    return True
            raise
        if ended:
            self._is_over()
            self._tell(url, then)
        return ended

    def _is_over(self) -> None:
        self._then, self.pending = Then(), False
        self._lane.leave()

    def _tell(self, url: str, then: Then) -> None:
        """The checkpoint is durable."""
        if then.saved is not None:
            then.saved(url)
        self._fire("on_checkpoint_saved", url)


def check_when_busy(when_busy: str) -> None:
    """Refuse what is neither ``"wait"`` nor ``"skip"``.

    Example:
        >>> from accel_callbacks.checkpoint.async_save import check_when_busy
        >>> check_when_busy("later")
        Traceback (most recent call last):
        ValueError: when_busy='later' is unknown; use 'wait' or 'skip'.
    """
    if when_busy not in ("wait", "skip"):
        raise ValueError(f"when_busy={when_busy!r} is unknown; use 'wait' or 'skip'.")


def _gently(tidy: Callable[[], None] | None) -> None:
    """The checkpoint is safe, whatever becomes of what is tidied up after it."""
    try:
        if tidy is not None:
            tidy()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        warnings.warn(f"tidying up after a save failed: {problem}", stacklevel=2)


def _say(text: str, rank: int) -> None:
    if rank == 0:
        print(f"[accel] {text}", file=sys.stderr, flush=True)
