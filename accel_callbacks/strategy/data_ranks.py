"""Which ranks read the same data, and over which of them gradients are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel_callbacks.distributed.rng import share_rng
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.plugins.parallelism import ParallelismConfig

__all__ = ["DataRanks"]


@dataclass(frozen=True)
class DataRanks:
    """The place of this rank among those that read different data.

    Args:
        rank: of this process; ranks that share a model have the same.
        world: number of ranks that read different data.
        device: of this rank.
        copies: number of ranks that share a replica of the model, and read the same data.
        losses: number of ranks whose losses are of different tokens: those of a sequence included.
        averaged_over: number of ranks with different losses over which backward averages gradients.
        parallelism: how all ranks are arranged, ``None`` for data parallelism over all.

    Example:
        >>> import torch
        >>> from accel_callbacks.strategy import DataRanks
        >>> list(DataRanks(rank=0, world=2, device=torch.device("cpu"), copies=4).first_of_each)
        [0, 4]
    """

    rank: int
    world: int
    device: torch.device
    copies: int = 1
    losses: int = 1
    averaged_over: int = 1
    parallelism: ParallelismConfig | None = None

    @classmethod
    def of(
        cls, topology: Topology, parallelism: ParallelismConfig | None, *, averages: bool
    ) -> DataRanks:
        """Return the record of this rank.

        Args:
            topology: the rank of this process among all.
            parallelism: how all ranks are arranged.
            averages: backward averages gradients over ranks with different losses.
        """
        sizes = {} if parallelism is None else parallelism.sizes
        copies = 1 if parallelism is None else parallelism.non_data_parallel_size
        world = topology.world_size // copies
        losses = world * sizes.get("cp", 1) * sizes.get("sp", 1)
        return cls(
            # Ranks that share a replica are neighbors: the axes of data are the outermost.
            topology.rank // copies,
            world,
            topology.device,
            copies,
            losses,
            losses if averages else 1,
            parallelism,
        )

    @property
    def first_of_each(self) -> Sequence[int]:
        """For each data rank, the rank whose samples count in metrics."""
        return range(0, self.world * self.copies, self.copies)

    @property
    def mesh(self) -> Any:
        """The named mesh of the ranks, None without one; collective at the first call."""
        if self.parallelism is None:
            return None
        return self.parallelism.build_device_mesh(self.device.type)

    def share_random_state(self) -> None:
        """Collective: let ranks that share a model draw the same numbers, as for its dropout."""
        if self.copies > 1:
            share_rng(self.copies, self.device)
