"""Options of fully sharded data parallelism (FSDP2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_callbacks.plugins.base import KwargsHandler

__all__ = ["FullyShardedDataParallelPlugin"]


@dataclass(frozen=True)
class FullyShardedDataParallelPlugin(KwargsHandler):
    """How FSDP2 (``torch.distributed.fsdp.fully_shard``) shards models.

    Args:
        fsdp_version: version of FSDP; 1 is trained as 2.
        sharding_strategy: what is sharded, in the words of version 1.
        reshard_after_forward: free weights after forward, and gather them again in backward.
        auto_wrap_policy: which modules are units.
        cpu_offload: keep shards in host memory.
        ignored_modules: modules that stay whole.
        activation_checkpointing: compute activations twice, to save memory.
        cpu_ram_efficient_loading: load weights of transformers on one rank only.
        transformer_cls_names_to_wrap: classes that are units.
        min_num_params: fewest parameters of a unit.

    Example:
        >>> from accel_callbacks import FullyShardedDataParallelPlugin
        >>> FullyShardedDataParallelPlugin(cpu_offload=True).cpu_offload
        True
    """

    # merged with b
    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    activation_checkpointing: Any = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None
