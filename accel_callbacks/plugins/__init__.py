"""Handlers of options: one file each."""

from accel_callbacks.plugins.accumulation import GradientAccumulationPlugin
from accel_callbacks.plugins.autocast import AutocastKwargs
from accel_callbacks.plugins.base import Handlers, KwargsHandler, OptionEnum, sort_handlers
from accel_callbacks.plugins.ddp import DDPCommunicationHookType, DistributedDataParallelKwargs
from accel_callbacks.plugins.dynamo import DynamoBackend, TorchDynamoPlugin
from accel_callbacks.plugins.fp8 import AORecipeKwargs
from accel_callbacks.plugins.process_group import InitProcessGroupKwargs
from accel_callbacks.plugins.scaler import GradScalerKwargs

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DistributedDataParallelKwargs",
    "DynamoBackend",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "Handlers",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "OptionEnum",
    "TorchDynamoPlugin",
    "sort_handlers",
]
