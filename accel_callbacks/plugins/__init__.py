"""Options of the parts of an Accelerator, as frozen dataclasses."""

# ruff: noqa: F403 (each star is a module of the table, for type checkers only)

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

# A run has one engine, and its options are those of that one.
_HOME = {
    "AORecipeKwargs": "precision",
    "AutocastKwargs": "precision",
    "DDPCommunicationHookType": "ddp",
    "DeepSpeedPlugin": "deepspeed",
    "DeepSpeedSequenceParallelConfig": "parallelism_handlers",
    "DistributedDataParallelKwargs": "ddp",
    "DynamoBackend": "compile",
    "FullyShardedDataParallelPlugin": "fsdp",
    "GradScalerKwargs": "precision",
    "GradientAccumulationPlugin": "gradient_accumulation",
    "Handlers": "base",
    "InitProcessGroupKwargs": "process_group",
    "KwargsHandler": "base",
    "MegatronLMPlugin": ".compat.megatron",
    "OptionEnum": "base",
    "ParallelismConfig": "parallelism",
    "TorchContextParallelConfig": "parallelism_handlers",
    "TorchDynamoPlugin": "compile",
    "TorchTensorParallelConfig": "parallelism_handlers",
    "TorchTensorParallelPlugin": "parallelism_handlers",
    "sort_handlers": "base",
}
# Type checkers see what the modules of the table have, so that no name is listed twice.
if TYPE_CHECKING:
    from accel_callbacks.compat.megatron import *
    from accel_callbacks.plugins.base import *
    from accel_callbacks.plugins.compile import *
    from accel_callbacks.plugins.ddp import *
    from accel_callbacks.plugins.deepspeed import *
    from accel_callbacks.plugins.fsdp import *
    from accel_callbacks.plugins.gradient_accumulation import *
    from accel_callbacks.plugins.parallelism import *
    from accel_callbacks.plugins.parallelism_handlers import *
    from accel_callbacks.plugins.precision import *
    from accel_callbacks.plugins.process_group import *
else:
    __all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
