"""Strategies, one per file; a new one is added to the registry here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names
from accel_callbacks.distributed.topology import DistributedType, Topology
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategies.base import Strategy

if TYPE_CHECKING:
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugins
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
    from accel_callbacks.strategies.ddp import DDP as DDP
    from accel_callbacks.strategies.fsdp import FSDP as FSDP
    from accel_callbacks.strategies.pipeline_parallel import PipelineParallel as PipelineParallel
    from accel_callbacks.strategies.single_device import SingleDevice as SingleDevice
    from accel_callbacks.strategies.tensor_parallel import TensorParallel as TensorParallel
    from accel_callbacks.strategies.xla import XLA as XLA

__all__ = [
    "DDP",
    "FSDP",
    "XLA",
    "PipelineParallel",
    "SingleDevice",
    "Strategy",
    "TensorParallel",
    "create_strategy",
]

# A run has one engine, and each imports parts of torch of its own.
_HOME = {
    "DDP": "ddp",
    "FSDP": "fsdp",
    "PipelineParallel": "pipeline_parallel",
    "SingleDevice": "single_device",
    "TensorParallel": "tensor_parallel",
    "XLA": "xla",
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
        >>> from accel_callbacks.strategies import create_strategy
        >>> create_strategy(Topology(torch.device("cpu"), world_size=2)).name
        'ddp'
    """
    if topology.distributed_type is DistributedType.XLA:
        from accel_callbacks.strategies.xla import XLA

        return XLA(topology, handlers, parallelism, fsdp)
    if parallelism is not None:
        parallelism = parallelism.fitted(topology.world_size, sharded=fsdp is not None)
    if deepspeed is not None:
        from accel_callbacks.strategies.deepspeed import DeepSpeed

        if fsdp is not None:
            raise ValueError("deepspeed_plugin and fsdp_plugin are two engines: give one of them.")
        return DeepSpeed(topology, handlers, parallelism, deepspeed)
    if parallelism is not None and parallelism.pp_enabled:
        from accel_callbacks.strategies.pipeline_parallel import PipelineParallel

        return PipelineParallel(topology, handlers, parallelism, fsdp)
    # Both layers and sequences are cut: FSDP shards the former over the ranks of the latter.
    both = (
        parallelism is not None
        and parallelism.tp_enabled
        and (parallelism.cp_enabled or parallelism.sp_enabled)
    )
    shards = parallelism is not None and parallelism.dp_shard_enabled
    if fsdp is not None or shards or both:
        from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
        from accel_callbacks.strategies.fsdp import FSDP

        return FSDP(topology, handlers, parallelism, fsdp or FullyShardedDataParallelPlugin())
    if parallelism is not None and parallelism.tp_enabled:
        from accel_callbacks.strategies.tensor_parallel import TensorParallel

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
