"""A value of each rank, compared without waiting for any of them."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

from accel_callbacks.collectives.group import next_number, rank, store, world_size

__all__ = ["Posted"]


class Posted:
    """The values that the ranks post under one name, each when it gets there.

    No rank waits, so that a check may be made where only some ranks come. Ranks that train in step
    have posted by the time of their next step.

    Args:
        name: of what is compared, the same on all ranks; the n-th of a name on each rank is
            compared with the n-th of the others.
        value: of this rank.

    Example:
        >>> import torch.distributed as dist
        >>> from accel_callbacks.collectives.posted import Posted
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> Posted("epoch", "3").values()
        ['3']
        >>> dist.destroy_process_group()
    """

    def __init__(self, name: str, value: str) -> None:
        # Numbered, as this process posts in the order of the others.
        prefix = f"posted/{name}/{next_number(f'posted {name}')}"
        self._keys = [f"{prefix}/{index}" for index in range(world_size())]
        with suppress(dist.DistError):  # a check ends no training
            store().set(self._keys[rank()], value)

    def values(self) -> list[str] | None:
        """Return the values in rank order, ``None`` until all ranks have posted."""
        values: list[str | None] = [None]
        with suppress(dist.DistError):
            values = store().read(self._keys)
        present = [value for value in values if value is not None]
        return present if len(present) == len(values) else None
