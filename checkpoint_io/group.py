"""The few collectives a save needs, behind a protocol small enough to implement anywhere."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["ProcessGroupLike", "SingleProcess", "TorchGroup"]


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
    longer than a save takes. On NCCL, a gloo group made for this by
    `torch.distributed.new_group(backend="gloo", timeout=...)` is the better choice.

    Args:
        process_group: a group of which this process is a member; None means the default group.

    Raises:
        RuntimeError: if `torch.distributed` is not initialised.

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
        self.rank: int = dist.get_rank(process_group)
        self.world_size: int = dist.get_world_size(process_group)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather one small object from every rank of the group."""
        result: list[Any] = [None] * self.world_size
        self._dist.all_gather_object(result, obj, group=self._group)
        return result

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Broadcast one small object from the group's rank `src`."""
        # torch wants the global rank here, also for a subgroup
        source = src if self._group is None else self._dist.get_global_rank(self._group, src)
        box = [obj]
        self._dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]
