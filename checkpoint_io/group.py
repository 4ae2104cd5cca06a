"""ProcessGroupLike, TorchGroup: the collectives a save needs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

__all__ = ["ProcessGroupLike", "SingleProcess", "TorchGroup"]

_PATIENCE = 3.0  # seconds: the others notice a broken connection within about one
_PAUSE = 0.05


def name_the_silent(store: Any, call: str, rank: int, ranks: Sequence[int]) -> str:
    """Say which ranks do not answer; "" if all of them do.

    Args:
        store: the key-value store of the process group.
        call: names the collective that broke, the same on all ranks.
        rank: this rank, as the ranks are counted below.
        ranks: all of them.
    """
    try:
        store.set(f"{call}/{rank}", b"here")
        silent = _wait(store, call, ranks)
    except Exception:  # it lives in rank 0, or in a launcher that ended with it
        return "rank 0 does not answer (the store of the process group is gone)"
    if not silent:
        return ""
    names = ", ".join(map(str, silent))
    return f"rank{'s' if len(silent) > 1 else ''} {names} did not answer within {_PATIENCE:.0f} s"


def _wait(store: Any, call: str, ranks: Sequence[int]) -> list[int]:
    """Wait a little for the others to answer; return those who did not."""
    silent = list(ranks)
    until = time.monotonic() + _PATIENCE
    while silent and time.monotonic() < until:
        silent = [one for one in silent if not store.check([f"{call}/{one}"])]
        if silent:
            time.sleep(_PAUSE)
    return silent


class ProcessGroupLike(Protocol):
    """What `save` asks of a group of processes: who am I, gather to all, broadcast.

    The objects passed are plain dicts, lists, strings, ints and bytes. Every rank makes the same
    calls in the same order.

    Example:
        >>> from checkpoint_io import ProcessGroupLike, SingleProcess
        >>> group: ProcessGroupLike = SingleProcess()
        >>> group.all_gather_object("hello")
        ['hello']
    """

    @property
    def rank(self) -> int:
        """This process's index, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, in rank order, on every rank."""

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return on every rank the object that rank `src` passed."""


class SingleProcess:
    """The group of one process, which is what `group=None` means.

    Example:
        >>> from checkpoint_io import SingleProcess
        >>> SingleProcess().broadcast_object(7)
        7
    """

    rank = 0
    world_size = 1

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return a list of just this object."""
        return [obj]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object itself."""
        return obj


class TorchGroup:
    """A `torch.distributed` process group (the default one for None).

    The ranks wait in a collective while the slowest one writes, so the group's timeout must be
    longer than a save takes, and a save in the background needs a group that nobody else uses:
    `TorchGroup.dedicated()` makes one.

    Args:
        process_group: a group of which this process is a member; None means the default group.

    Raises:
        RuntimeError: if `torch.distributed` is not initialised.
        ValueError: this process is not a member of the group.

    Example:
        >>> import torch.distributed as dist
        >>> from checkpoint_io import SingleProcess, TorchGroup
        >>> group = TorchGroup() if dist.is_initialized() else SingleProcess()
        >>> group.world_size
        1
    """

    def __init__(self, process_group: Any = None) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call init_process_group() first, "
                "or pass group=None to save from one process"
            )
        self._dist = dist
        self._group = process_group
        self._owned = False
        self._calls = 0
        self.rank: int = dist.get_rank(process_group)
        self.world_size: int = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(
                "this process is not a member of the group: let only its members save and load "
                "with it, or pass process_group=None for all processes"
            )

    @classmethod
    def dedicated(cls, timeout: timedelta = timedelta(hours=2)) -> TorchGroup:
        """Make a gloo group of all processes for saving alone; a collective call.

        Its messages go over the CPU, apart from those of training (on gloo or NCCL), so that it can
        be used from another thread at the same time.

        Args:
            timeout: how long a rank waits for the others; default 2 hours.

        Raises:
            RuntimeError: if `torch.distributed` is not initialised.
        """
        return cls().beside(timeout)

    def beside(self, timeout: timedelta = timedelta(hours=2)) -> TorchGroup:
        """Make such a group of the ranks of this one; collective among these.

        Args:
            timeout: how long a rank waits for the others; default 2 hours.
        """
        options: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
        if self._group is not None:
            ranks = self._dist.get_process_group_ranks(self._group)
            options.update(ranks=ranks, use_local_synchronization=True)  # the others do not come
        group = TorchGroup(self._dist.new_group(**options))
        group._owned = True
        return group

    def close(self) -> None:
        """Give a dedicated group back; the second time, and for other groups, do nothing."""
        if self._owned and self._dist.is_initialized():
            self._dist.destroy_process_group(self._group)
        self._owned = False

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather one small object from every rank of the group."""
        result: list[Any] = [None] * self.world_size
        with self._naming_the_silent():
            self._dist.all_gather_object(result, obj, group=self._group)
        return result

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Broadcast one small object from the group's rank `src`."""
        # torch wants the global rank here, also for a subgroup
        source = src if self._group is None else self._dist.get_global_rank(self._group, src)
        box = [obj]
        with self._naming_the_silent():
            self._dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    @contextmanager
    def _naming_the_silent(self) -> Iterator[None]:
        """Around a collective: where it breaks, the error says which ranks are gone."""
        self._calls += 1
        try:
            yield
        except RuntimeError as error:
            core = self._dist.distributed_c10d
            group = self._group or self._dist.group.WORLD
            call = f"checkpoint_io/{getattr(group, 'group_name', '')}/{self._calls}"
            store, ranks = core._get_default_store(), range(self.world_size)
            if silent := name_the_silent(store, call, self.rank, ranks):
                raise self._dist.DistBackendError(f"{silent}: {error}") from error
            raise
