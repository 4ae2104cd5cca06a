"""Options of fully sharded data parallelism (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from accel_callbacks.plugins.base import KwargsHandler

__all__ = ["FullyShardedDataParallelPlugin"]


@dataclass(frozen=True)
class FullyShardedDataParallelPlugin(KwargsHandler):
    """How FSDP2 (``torch.distributed.fsdp.fully_shard``) shards models.

    Args:
        cpu_offload: keep shards in host memory.
        sync_module_states: give all ranks the values of rank 0 where theirs differ; on by default.
        param_init_fn: initializes the one module that it is given; used for what was built on the
            meta device and no checkpoint has.
        activation_checkpointing: compute blocks again in backward: ``True``, every how many blocks,
            or a policy of :func:`accel_callbacks.apply_activation_checkpointing`.
        cpu_ram_efficient_loading: let only rank 0 load weights with ``from_pretrained``.

    Example:
        >>> from accel_callbacks import FullyShardedDataParallelPlugin
        >>> FullyShardedDataParallelPlugin(cpu_offload=True).cpu_offload
        True
    """

    cpu_offload: bool | Any = False
    sync_module_states: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], Any] | None = None
    activation_checkpointing: Any = None
    cpu_ram_efficient_loading: bool | None = None
