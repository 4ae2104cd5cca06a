"""The groups in which processes meet while they save: never the one that training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import cut, spare

__all__ = ["SavingControl", "SavingLane"]

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
        >>> from accel_callbacks.saving_lane import SavingLane
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
        >>> from accel_callbacks.saving_lane import SavingControl, SavingLane
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
