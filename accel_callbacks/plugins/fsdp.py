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
        cpu_offload: keep shards in host memory.

    Example:
        >>> from accel_callbacks import FullyShardedDataParallelPlugin
        >>> FullyShardedDataParallelPlugin(cpu_offload=True).cpu_offload
        True
    """

    cpu_offload: bool | Any = False
