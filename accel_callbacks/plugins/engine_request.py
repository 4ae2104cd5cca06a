"""What a run asks of its engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.parallelism import AXES, ParallelismConfig

if TYPE_CHECKING:
    from accel_callbacks.distributed.topology import Topology
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugins
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin

__all__ = ["EngineRequest"]


@dataclass(frozen=True)
class EngineRequest:
    """What a run asks of its engine, for the conditions under which one is taken.

    Args:
        topology: the rank and device of this process.
        handlers: the options of other parts, those of an engine of your own among them.
        parallelism: how the ranks are arranged, as the script or the launch has it; or ``None``.
        fsdp: how models are sharded; ``None`` if nothing was said about it.
        deepspeed: how DeepSpeed trains models; ``None`` if it does not.

    Example:
        >>> import torch
        >>> from accel_callbacks import Topology
        >>> from accel_callbacks.engines import EngineRequest
        >>> EngineRequest(Topology(torch.device("cpu"))).axes.pp_enabled
        False
    """

    topology: Topology
    handlers: Handlers = field(default_factory=Handlers)
    parallelism: ParallelismConfig | None = None
    fsdp: FullyShardedDataParallelPlugin | None = None
    deepspeed: DeepSpeedPlugins | None = None

    @property
    def axes(self) -> ParallelismConfig:
        """How the ranks are arranged; without an axis of more than one if nothing was said."""
        # Explicitly, as sizes that are left out are those of the launch.
        alone: dict[str, Any] = {f"{axis}_size": 1 for axis in AXES}
        return self.parallelism or ParallelismConfig(**alone)

    @property
    def arranged(self) -> ParallelismConfig | None:
        """How all the ranks there are are arranged; None for data parallelism over all.

        Raises:
            ValueError: the axes do not arrange all ranks.
        """
        if self.parallelism is None:
            return None
        world_size = self.topology.world_size
        return self.parallelism.fitted(world_size, sharded=self.fsdp is not None)
