"""Options of the parts of an Accelerator, as frozen dataclasses."""

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
