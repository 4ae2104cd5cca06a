"""Options of the parts of an Accelerator, as frozen dataclasses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

if TYPE_CHECKING:
    from accel_callbacks.plugins.base import Handlers, KwargsHandler, OptionEnum, sort_handlers
    from accel_callbacks.plugins.compile import DynamoBackend, TorchDynamoPlugin
    from accel_callbacks.plugins.ddp import DDPCommunicationHookType, DistributedDataParallelKwargs
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugin
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
    from accel_callbacks.plugins.gradient_accumulation import GradientAccumulationPlugin
    from accel_callbacks.plugins.megatron import MegatronLMPlugin
    from accel_callbacks.plugins.parallelism import ParallelismConfig
    from accel_callbacks.plugins.parallelism_handlers import (
        DeepSpeedSequenceParallelConfig,
        TorchContextParallelConfig,
        TorchTensorParallelConfig,
        TorchTensorParallelPlugin,
    )
    from accel_callbacks.plugins.precision import AORecipeKwargs, AutocastKwargs, GradScalerKwargs
    from accel_callbacks.plugins.process_group import InitProcessGroupKwargs

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "Handlers",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "MegatronLMPlugin",
    "OptionEnum",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "sort_handlers",
]

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
    "MegatronLMPlugin": "megatron",
    "OptionEnum": "base",
    "ParallelismConfig": "parallelism",
    "TorchContextParallelConfig": "parallelism_handlers",
    "TorchDynamoPlugin": "compile",
    "TorchTensorParallelConfig": "parallelism_handlers",
    "TorchTensorParallelPlugin": "parallelism_handlers",
    "sort_handlers": "base",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
