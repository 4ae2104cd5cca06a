"""Strategies, one per file; a new one is added to the registry here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names
from accel_callbacks.distributed.topology import DistributedType, Topology
from accel_callbacks.engines.base import Strategy
from accel_callbacks.engines.data_ranks import DataRanks
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.parallelism import ParallelismConfig

if TYPE_CHECKING:
    from accel_callbacks.engines.ddp.strategy import DDP as DDP
    from accel_callbacks.engines.fsdp.strategy import FSDP as FSDP
    from accel_callbacks.engines.pipeline.strategy import PipelineParallel as PipelineParallel
    from accel_callbacks.engines.single_device import SingleDevice as SingleDevice
    from accel_callbacks.engines.tensor.strategy import TensorParallel as TensorParallel
    from accel_callbacks.engines.xla.strategy import XLA as XLA
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugins
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin

__all__ = [
    "DDP",
    "FSDP",
    "XLA",
    "DataRanks",
    "PipelineParallel",
    "SingleDevice",
    "Strategy",
    "TensorParallel",
    "create_strategy",
]

# A run has one engine, and each imports parts of torch of its own.
_HOME = {
    "DDP": "ddp.strategy",
    "FSDP": "fsdp.strategy",
    "PipelineParallel": "pipeline.strategy",
    "SingleDevice": "single_device",
    "TensorParallel": "tensor.strategy",
    "XLA": "xla.strategy",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)

# The names of those that a kind of run has where no other is asked for.
_REGISTRY: dict[DistributedType, str] = {
    DistributedType.NO: "SingleDevice",
    DistributedType.MULTI_CPU: "DDP",
    DistributedType.MULTI_GPU: "DDP",
}


def create_strategy(
    topology: Topology,
    handlers: Handlers | None = None,
    parallelism: ParallelismConfig | None = None,
    fsdp: FullyShardedDataParallelPlugin | None = None,
    deepspeed: DeepSpeedPlugins | None = None,
) -> Strategy:
    """Return the strategy for this topology, with these options.

    Args:
        topology: the rank and device of this process.
        handlers: the options; the defaults if ``None``.
        parallelism: how the ranks are arranged; data parallelism over all if ``None``.
        fsdp: how models are sharded; the default options if ``None``.
        deepspeed: how DeepSpeed trains models; it does not if ``None``.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: two engines are asked for, the axes do not arrange all ranks, or do not go
            together.

    Example:
        >>> import torch
        >>> from accel_callbacks import Topology
        >>> from accel_callbacks.engines import create_strategy
        >>> create_strategy(Topology(torch.device("cpu"), world_size=2)).name
        'ddp'
    """
    strategy = _choose(topology, handlers, parallelism, fsdp, deepspeed)
    arranged = strategy.parallelism
    if arranged is not None and (arranged.cp_enabled or arranged.sp_enabled):
        # Imported here, because few runs share sequences.
        from accel_callbacks.engines.context.head_exchange import sequence_parallelism

        strategy.sequences = sequence_parallelism(arranged, strategy.data)
    return strategy


def _choose(
    topology: Topology,
    handlers: Handlers | None,
    parallelism: ParallelismConfig | None,
    fsdp: FullyShardedDataParallelPlugin | None,
    deepspeed: DeepSpeedPlugins | None,
) -> Strategy:
    if topology.distributed_type is DistributedType.XLA:
        from accel_callbacks.engines.xla.strategy import XLA

        return XLA(topology, handlers, parallelism, fsdp)
    if parallelism is not None:
        parallelism = parallelism.fitted(topology.world_size, sharded=fsdp is not None)
    if deepspeed is not None:
        from accel_callbacks.engines.deepspeed.strategy import DeepSpeed

        if fsdp is not None:
            raise ValueError("deepspeed_plugin and fsdp_plugin are two engines: give one of them.")
        return DeepSpeed(topology, handlers, parallelism, deepspeed)
    if parallelism is not None and parallelism.pp_enabled:
        from accel_callbacks.engines.pipeline.strategy import PipelineParallel

        return PipelineParallel(topology, handlers, parallelism, fsdp)
    # Both layers and sequences are cut: FSDP shards the former over the ranks of the latter.
    both = (
        parallelism is not None
        and parallelism.tp_enabled
        and (parallelism.cp_enabled or parallelism.sp_enabled)
    )
    shards = parallelism is not None and parallelism.dp_shard_enabled
    if fsdp is not None or shards or both:
        from accel_callbacks.engines.fsdp.strategy import FSDP
        from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin

        return FSDP(topology, handlers, parallelism, fsdp or FullyShardedDataParallelPlugin())
    if parallelism is not None and parallelism.tp_enabled:
        from accel_callbacks.engines.tensor.strategy import TensorParallel

        _refuse_replicas(parallelism)
        return TensorParallel(topology, handlers, parallelism)
    kind: type[Strategy] = getattr(sys.modules[__name__], _REGISTRY[topology.distributed_type])
    return kind(topology, handlers, parallelism)


def _refuse_replicas(parallelism: ParallelismConfig) -> None:
    if parallelism.dp_replicate_enabled:
        raise ValueError(
            f"tp_size={parallelism.tp_size} does not go with dp_replicate_size="
            f"{parallelism.dp_replicate_size} alone: shard over the data axis, with "
            f"dp_shard_size={parallelism.dp_replicate_size}."
        )
