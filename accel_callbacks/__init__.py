"""Lightning-style callbacks, trackers and safe checkpoints for plain PyTorch loops.

Every name below is imported from its module when it is first used, so that importing this
package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

__version__ = "0.2.0"

_HOME = {
    "AORecipeKwargs": "plugins.precision",
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "Accelerator": "accelerator",
    "AcceleratorConfig": "options",
    "AcceleratorState": "compat.state",
    "AutocastKwargs": "plugins.precision",
    "BatchSamplerShard": "data.sampler",
    "Callback": "callbacks",
    "DDPCommunicationHookType": "plugins.ddp",
    "DataLoaderConfiguration": "data.config",
    "DataLoaderDispatcher": "data.dispatch",
    "DataLoaderShard": "data.loader",
    "DeepSpeedPlugin": "plugins.deepspeed",
    "DeepSpeedSequenceParallelConfig": "plugins.parallelism_handlers",
    "DistributedDataParallelKwargs": "plugins.ddp",
    "DistributedOperationException": "errors",
    "DistributedType": "plugins.distributed_type",
    "DynamoBackend": "plugins.compile",
    "FullyShardedDataParallelPlugin": "plugins.fsdp",
    "GeneralTracker": "tracking.general_tracker",
    "GradScalerKwargs": "plugins.precision",
    "GradientAccumulationPlugin": "plugins.gradient_accumulation",
    "GradientState": "compat.state",
    "InitProcessGroupKwargs": "plugins.process_group",
    "IterableDatasetShard": "data.iterable",
    "KwargsHandler": "plugins.base",
    "LocalSGD": "local_sgd",
    "LoggerType": "tracking.general_tracker",
    "LostRankError": "errors",
    "MegatronLMPlugin": "compat.megatron",
    "MultiProcessAdapter": "logging",
    "ParallelismConfig": "plugins.parallelism",
    "PartialState": "compat.state",
    "ProfileKwargs": "plugins.profiler",
    "ProjectConfiguration": "checkpoint.project",
    "RNGType": "distributed.rng",
    "RemoteError": "errors",
    "ResumeError": "errors",
    "SeedableRandomSampler": "data.sampler",
    "Topology": "distributed.topology",
    "TorchContextParallelConfig": "plugins.parallelism_handlers",
    "TorchDynamoPlugin": "plugins.compile",
    "TorchTensorParallelConfig": "plugins.parallelism_handlers",
    "TorchTensorParallelPlugin": "plugins.parallelism_handlers",
    "TrainingRun": "loop.run",
    "apply_activation_checkpointing": "models.activation_checkpointing",
    "broadcast": "collectives",
    "broadcast_object": "collectives",
    "broadcast_object_list": "collectives",
    "clear_device_cache": "memory",
    "cpu_offload": "compat.big_modeling",
    "cpu_offload_with_hook": "compat.hooks",
    "debug_launcher": "launch.notebook",
    "disk_offload": "compat.big_modeling",
    "dispatch_model": "compat.big_modeling",
    "find_executable_batch_size": "addons.tuning.executable_batch_size",
    "gather": "collectives",
    "gather_object": "collectives",
    "get_logger": "logging",
    "infer_auto_device_map": "models.offload.device_map",
    "init_empty_weights": "models.empty_weights",
    "init_on_device": "models.empty_weights",
    "initialize_weights": "models.absent_weights",
    "is_main_process": "distributed.process_control",
    "last_process_only": "distributed.process_control",
    "load_checkpoint_and_dispatch": "compat.big_modeling",
    "load_checkpoint_in_model": "models.load",
    "local_main_process_first": "distributed.process_control",
    "local_main_process_only": "distributed.process_control",
    "main_process_first": "distributed.process_control",
    "main_process_only": "distributed.process_control",
    "notebook_launcher": "launch.notebook",
    "on_local_process": "distributed.process_control",
    "on_process": "distributed.process_control",
    "pad_across_processes": "collectives",
    "prepare_data_loader": "data.prepare",
    "reduce": "collectives",
    "release_memory": "memory",
    "send_to_device": "data.device",
    "set_seed": "distributed.rng",
    "skip_first_batches": "data.loader",
    "split_between_processes": "distributed.process_control",
    "synchronize": "distributed.process_control",
    "synchronize_rng_state": "distributed.rng",
    "synchronize_rng_states": "distributed.rng",
    "tqdm": "logging",
    "wait_for_everyone": "compat.operations",
}

# A type checker cannot compute it, and takes the imports below instead.
if not TYPE_CHECKING:
    __all__ = [*sorted(_HOME), "__version__"]

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator as Accelerator
    from accel_callbacks.addons.tuning.executable_batch_size import (
        find_executable_batch_size as find_executable_batch_size,
    )
    from accel_callbacks.callbacks import Callback as Callback
    from accel_callbacks.checkpoint.project import ProjectConfiguration as ProjectConfiguration
    from accel_callbacks.collectives import broadcast as broadcast
    from accel_callbacks.collectives import broadcast_object as broadcast_object
    from accel_callbacks.collectives import broadcast_object_list as broadcast_object_list
    from accel_callbacks.collectives import gather as gather
    from accel_callbacks.collectives import gather_object as gather_object
    from accel_callbacks.collectives import pad_across_processes as pad_across_processes
    from accel_callbacks.collectives import reduce as reduce
    from accel_callbacks.compat.big_modeling import cpu_offload as cpu_offload
    from accel_callbacks.compat.big_modeling import disk_offload as disk_offload
    from accel_callbacks.compat.big_modeling import dispatch_model as dispatch_model
    from accel_callbacks.compat.big_modeling import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from accel_callbacks.compat.hooks import cpu_offload_with_hook as cpu_offload_with_hook
    from accel_callbacks.compat.megatron import MegatronLMPlugin as MegatronLMPlugin
    from accel_callbacks.compat.operations import wait_for_everyone as wait_for_everyone
    from accel_callbacks.compat.state import AcceleratorState as AcceleratorState
    from accel_callbacks.compat.state import GradientState as GradientState
    from accel_callbacks.compat.state import PartialState as PartialState
    from accel_callbacks.data.config import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_callbacks.data.device import send_to_device as send_to_device
    from accel_callbacks.data.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
    from accel_callbacks.data.iterable import IterableDatasetShard as IterableDatasetShard
    from accel_callbacks.data.loader import DataLoaderShard as DataLoaderShard
    from accel_callbacks.data.loader import skip_first_batches as skip_first_batches
    from accel_callbacks.data.prepare import prepare_data_loader as prepare_data_loader
    from accel_callbacks.data.sampler import BatchSamplerShard as BatchSamplerShard
    from accel_callbacks.data.sampler import SeedableRandomSampler as SeedableRandomSampler
    from accel_callbacks.distributed.process_control import is_main_process as is_main_process
    from accel_callbacks.distributed.process_control import last_process_only as last_process_only
    from accel_callbacks.distributed.process_control import (
        local_main_process_first as local_main_process_first,
    )
    from accel_callbacks.distributed.process_control import (
        local_main_process_only as local_main_process_only,
    )
    from accel_callbacks.distributed.process_control import main_process_first as main_process_first
    from accel_callbacks.distributed.process_control import main_process_only as main_process_only
    from accel_callbacks.distributed.process_control import on_local_process as on_local_process
    from accel_callbacks.distributed.process_control import on_process as on_process
    from accel_callbacks.distributed.process_control import (
        split_between_processes as split_between_processes,
    )
    from accel_callbacks.distributed.process_control import synchronize as synchronize
    from accel_callbacks.distributed.rng import RNGType as RNGType
    from accel_callbacks.distributed.rng import set_seed as set_seed
    from accel_callbacks.distributed.rng import synchronize_rng_state as synchronize_rng_state
    from accel_callbacks.distributed.rng import synchronize_rng_states as synchronize_rng_states
    from accel_callbacks.distributed.topology import Topology as Topology
    from accel_callbacks.errors import (
        DistributedOperationException as DistributedOperationException,
    )
    from accel_callbacks.errors import LostRankError as LostRankError
    from accel_callbacks.errors import RemoteError as RemoteError
    from accel_callbacks.errors import ResumeError as ResumeError
    from accel_callbacks.launch.notebook import debug_launcher as debug_launcher
    from accel_callbacks.launch.notebook import notebook_launcher as notebook_launcher
    from accel_callbacks.local_sgd import LocalSGD as LocalSGD
    from accel_callbacks.logging import MultiProcessAdapter as MultiProcessAdapter
    from accel_callbacks.logging import get_logger as get_logger
    from accel_callbacks.logging import tqdm as tqdm
    from accel_callbacks.loop.run import TrainingRun as TrainingRun
    from accel_callbacks.memory import clear_device_cache as clear_device_cache
    from accel_callbacks.memory import release_memory as release_memory
    from accel_callbacks.models.absent_weights import initialize_weights as initialize_weights
    from accel_callbacks.models.activation_checkpointing import (
        apply_activation_checkpointing as apply_activation_checkpointing,
    )
    from accel_callbacks.models.empty_weights import init_empty_weights as init_empty_weights
    from accel_callbacks.models.empty_weights import init_on_device as init_on_device
    from accel_callbacks.models.load import load_checkpoint_in_model as load_checkpoint_in_model
    from accel_callbacks.models.offload.device_map import (
        infer_auto_device_map as infer_auto_device_map,
    )
    from accel_callbacks.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from accel_callbacks.options import AcceleratorConfig as AcceleratorConfig
    from accel_callbacks.plugins.base import KwargsHandler as KwargsHandler
    from accel_callbacks.plugins.compile import DynamoBackend as DynamoBackend
    from accel_callbacks.plugins.compile import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_callbacks.plugins.ddp import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_callbacks.plugins.ddp import (
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    )
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
    from accel_callbacks.plugins.distributed_type import DistributedType as DistributedType
    from accel_callbacks.plugins.fsdp import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from accel_callbacks.plugins.gradient_accumulation import (
        GradientAccumulationPlugin as GradientAccumulationPlugin,
    )
    from accel_callbacks.plugins.parallelism import ParallelismConfig as ParallelismConfig
    from accel_callbacks.plugins.parallelism_handlers import (
        DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    )
    from accel_callbacks.plugins.parallelism_handlers import (
        TorchContextParallelConfig as TorchContextParallelConfig,
    )
    from accel_callbacks.plugins.parallelism_handlers import (
        TorchTensorParallelConfig as TorchTensorParallelConfig,
    )
    from accel_callbacks.plugins.parallelism_handlers import (
        TorchTensorParallelPlugin as TorchTensorParallelPlugin,
    )
    from accel_callbacks.plugins.precision import AORecipeKwargs as AORecipeKwargs
    from accel_callbacks.plugins.precision import AutocastKwargs as AutocastKwargs
    from accel_callbacks.plugins.precision import GradScalerKwargs as GradScalerKwargs
    from accel_callbacks.plugins.process_group import (
        InitProcessGroupKwargs as InitProcessGroupKwargs,
    )
    from accel_callbacks.plugins.profiler import ProfileKwargs as ProfileKwargs
    from accel_callbacks.scheduler import AcceleratedScheduler as AcceleratedScheduler
    from accel_callbacks.tracking.general_tracker import GeneralTracker as GeneralTracker
    from accel_callbacks.tracking.general_tracker import LoggerType as LoggerType


__getattr__, __dir__ = lazy_names(__name__, _HOME)
