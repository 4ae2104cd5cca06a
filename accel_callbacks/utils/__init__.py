"""Names that scripts import from ``accelerate.utils``, ``.state``, ``.data_loader`` and others.

Each name is imported lazily from the module that defines it. The package also has all names of
``accel_callbacks``, and ``is_<package>_available`` for many packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import accel_callbacks
from accel_callbacks._lazy import lazy_names

_HOME = {
    "AlignDevicesHook": "offload.hooks",
    "BnbQuantizationConfig": "offload.quantize",
    "CpuOffload": "offload.hooks",
    "CustomDtype": "offload.sizes",
    "DummyOptim": "plugins.deepspeed_dummies",
    "DummyScheduler": "plugins.deepspeed_dummies",
    "HfDeepSpeedConfig": "plugins.deepspeed_config",
    "LayerwiseCastingHook": "offload.casting",
    "ModelHook": "offload.hooks",
    "OffloadedWeightsLoader": "offload.folder",
    "PrecisionType": "utils.modeling",
    "PrefixedDataset": "offload.folder",
    "SequentialHook": "offload.hooks",
    "SkipBatchSampler": "data.skip",
    "SkipDataLoader": "data.skip",
    "TensorInformation": "utils.operations",
    "UserCpuOffloadHook": "offload.hooks",
    "add_hook_to_module": "offload.hooks",
    "align_module_device": "offload.tensors",
    "attach_align_device_hook": "offload.hooks",
    "attach_align_device_hook_on_blocks": "offload.hooks",
    "attach_execution_device_hook": "offload.hooks",
    "attach_layerwise_casting_hooks": "offload.casting",
    "calculate_maximum_sizes": "offload.sizes",
    "check_device_map": "offload.device_map",
    "check_tied_parameters_in_config": "offload.sizes",
    "check_tied_parameters_on_same_device": "offload.device_map",
    "clean_device_map": "offload.device_map",
    "compare_versions": "utils.imports",
    "compute_module_sizes": "offload.sizes",
    "compute_module_total_buffer_size": "offload.sizes",
    "concatenate": "utils.operations",
    "convert_file_size_to_int": "offload.sizes",
    "convert_outputs_to_fp32": "utils.operations",
    "convert_to_fp32": "utils.operations",
    "disable_fsdp_ram_efficient_loading": "utils.fsdp",
    "dtype_byte_size": "offload.sizes",
    "enable_fsdp_ram_efficient_loading": "utils.fsdp",
    "extract_model_from_parallel": "utils.modeling",
    "extract_submodules_state_dict": "offload.folder",
    "fallback_allocate": "offload.device_map",
    "find_batch_size": "utils.operations",
    "find_device": "utils.operations",
    "find_tied_parameters": "offload.sizes",
    "fsdp2_prepare_model": "utils.fsdp",
    "get_active_deepspeed_plugin": "plugins.deepspeed",
    "get_balanced_memory": "offload.device_map",
    "get_data_structure": "utils.operations",
    "get_max_layer_size": "offload.sizes",
    "get_max_memory": "offload.budgets",
    "get_module_leaves": "offload.sizes",
    "get_module_size_with_ties": "offload.device_map",
    "get_non_persistent_buffers": "offload.sizes",
    "get_shape": "utils.operations",
    "get_state_dict_from_offload": "offload.tensors",
    "get_state_dict_offloaded_model": "offload.tensors",
    "has_4bit_bnb_layers": "offload.quantize",
    "has_offloaded_params": "offload.tensors",
    "honor_type": "utils.operations",
    "id_tensor_storage": "offload.tensors",
    "initialize_tensors": "utils.operations",
    "is_bf16_available": "utils.imports",
    "is_compiled_module": "utils.modeling",
    "is_cuda_available": "utils.imports",
    "is_fp16_available": "utils.imports",
    "is_fp8_available": "utils.imports",
    "is_initialized": "distributed.topology",
    "is_mps_available": "utils.imports",
    "is_namedtuple": "utils.operations",
    "is_tensor_information": "utils.operations",
    "is_torch_tensor": "utils.operations",
    "is_torch_version": "utils.imports",
    "is_xpu_available": "utils.imports",
    "listify": "utils.operations",
    "load_and_quantize_model": "offload.quantize",
    "load_fsdp_model": "utils.fsdp",
    "load_fsdp_optimizer": "utils.fsdp",
    "load_offloaded_weight": "offload.folder",
    "load_offloaded_weights": "offload.folder",
    "merge_fsdp_weights": "utils.fsdp",
    "named_module_tensors": "offload.sizes",
    "offload_state_dict": "offload.folder",
    "offload_weight": "offload.folder",
    "pad_input_tensors": "utils.operations",
    "recursive_getattr": "offload.tensors",
    "recursively_apply": "utils.operations",
    "remove_hook_from_module": "offload.hooks",
    "remove_hook_from_submodules": "offload.hooks",
    "retie_parameters": "offload.tensors",
    "save_fsdp_model": "utils.fsdp",
    "save_fsdp_optimizer": "utils.fsdp",
    "save_offload_index": "offload.folder",
    "set_module_tensor_to_device": "offload.tensors",
    "should_reduce_batch_size": "memory",
    "slice_tensors": "utils.operations",
}
_SHARED = [name for name in accel_callbacks.__all__ if name != "__version__"]

__all__ = sorted([*_HOME, *_SHARED])

if TYPE_CHECKING:
    from accel_callbacks import AcceleratedOptimizer as AcceleratedOptimizer
    from accel_callbacks import AcceleratedScheduler as AcceleratedScheduler
    from accel_callbacks import Accelerator as Accelerator
    from accel_callbacks import AcceleratorConfig as AcceleratorConfig
    from accel_callbacks import AcceleratorState as AcceleratorState
    from accel_callbacks import AORecipeKwargs as AORecipeKwargs
    from accel_callbacks import AutocastKwargs as AutocastKwargs
    from accel_callbacks import BatchSamplerShard as BatchSamplerShard
    from accel_callbacks import Callback as Callback
    from accel_callbacks import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_callbacks import DataLoaderDispatcher as DataLoaderDispatcher
    from accel_callbacks import DataLoaderShard as DataLoaderShard
    from accel_callbacks import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_callbacks import DeepSpeedPlugin as DeepSpeedPlugin
    from accel_callbacks import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
    from accel_callbacks import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel_callbacks import DistributedOperationException as DistributedOperationException
    from accel_callbacks import DistributedType as DistributedType
    from accel_callbacks import DynamoBackend as DynamoBackend
    from accel_callbacks import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel_callbacks import GeneralTracker as GeneralTracker
    from accel_callbacks import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_callbacks import GradientState as GradientState
    from accel_callbacks import GradScalerKwargs as GradScalerKwargs
    from accel_callbacks import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_callbacks import IterableDatasetShard as IterableDatasetShard
    from accel_callbacks import KwargsHandler as KwargsHandler
    from accel_callbacks import LocalSGD as LocalSGD
    from accel_callbacks import LoggerType as LoggerType
    from accel_callbacks import LostRankError as LostRankError
    from accel_callbacks import MegatronLMPlugin as MegatronLMPlugin
    from accel_callbacks import MultiProcessAdapter as MultiProcessAdapter
    from accel_callbacks import ParallelismConfig as ParallelismConfig
    from accel_callbacks import PartialState as PartialState
    from accel_callbacks import ProfileKwargs as ProfileKwargs
    from accel_callbacks import ProjectConfiguration as ProjectConfiguration
    from accel_callbacks import RemoteError as RemoteError
    from accel_callbacks import ResumeError as ResumeError
    from accel_callbacks import RNGType as RNGType
    from accel_callbacks import SeedableRandomSampler as SeedableRandomSampler
    from accel_callbacks import Topology as Topology
    from accel_callbacks import TorchContextParallelConfig as TorchContextParallelConfig
    from accel_callbacks import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_callbacks import TorchTensorParallelConfig as TorchTensorParallelConfig
    from accel_callbacks import TorchTensorParallelPlugin as TorchTensorParallelPlugin
    from accel_callbacks import TrainingRun as TrainingRun
    from accel_callbacks import apply_activation_checkpointing as apply_activation_checkpointing
    from accel_callbacks import broadcast as broadcast
    from accel_callbacks import broadcast_object as broadcast_object
    from accel_callbacks import broadcast_object_list as broadcast_object_list
    from accel_callbacks import clear_device_cache as clear_device_cache
    from accel_callbacks import cpu_offload as cpu_offload
    from accel_callbacks import cpu_offload_with_hook as cpu_offload_with_hook
    from accel_callbacks import debug_launcher as debug_launcher
    from accel_callbacks import disk_offload as disk_offload
    from accel_callbacks import dispatch_model as dispatch_model
    from accel_callbacks import find_executable_batch_size as find_executable_batch_size
    from accel_callbacks import gather as gather
    from accel_callbacks import gather_object as gather_object
    from accel_callbacks import get_logger as get_logger
    from accel_callbacks import infer_auto_device_map as infer_auto_device_map
    from accel_callbacks import init_empty_weights as init_empty_weights
    from accel_callbacks import init_on_device as init_on_device
    from accel_callbacks import initialize_weights as initialize_weights
    from accel_callbacks import is_main_process as is_main_process
    from accel_callbacks import last_process_only as last_process_only
    from accel_callbacks import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from accel_callbacks import load_checkpoint_in_model as load_checkpoint_in_model
    from accel_callbacks import local_main_process_first as local_main_process_first
    from accel_callbacks import local_main_process_only as local_main_process_only
    from accel_callbacks import main_process_first as main_process_first
    from accel_callbacks import main_process_only as main_process_only
    from accel_callbacks import notebook_launcher as notebook_launcher
    from accel_callbacks import on_local_process as on_local_process
    from accel_callbacks import on_process as on_process
    from accel_callbacks import pad_across_processes as pad_across_processes
    from accel_callbacks import prepare_data_loader as prepare_data_loader
    from accel_callbacks import reduce as reduce
    from accel_callbacks import release_memory as release_memory
    from accel_callbacks import send_to_device as send_to_device
    from accel_callbacks import set_seed as set_seed
    from accel_callbacks import skip_first_batches as skip_first_batches
    from accel_callbacks import split_between_processes as split_between_processes
    from accel_callbacks import synchronize as synchronize
    from accel_callbacks import synchronize_rng_state as synchronize_rng_state
    from accel_callbacks import synchronize_rng_states as synchronize_rng_states
    from accel_callbacks import tqdm as tqdm
    from accel_callbacks import wait_for_everyone as wait_for_everyone
    from accel_callbacks.data.skip import SkipBatchSampler as SkipBatchSampler
    from accel_callbacks.data.skip import SkipDataLoader as SkipDataLoader
    from accel_callbacks.distributed.topology import is_initialized as is_initialized
    from accel_callbacks.memory import should_reduce_batch_size as should_reduce_batch_size
    from accel_callbacks.offload.budgets import get_max_memory as get_max_memory
    from accel_callbacks.offload.casting import LayerwiseCastingHook as LayerwiseCastingHook
    from accel_callbacks.offload.casting import (
        attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
    )
    from accel_callbacks.offload.device_map import check_device_map as check_device_map
    from accel_callbacks.offload.device_map import (
        check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    )
    from accel_callbacks.offload.device_map import clean_device_map as clean_device_map
    from accel_callbacks.offload.device_map import fallback_allocate as fallback_allocate
    from accel_callbacks.offload.device_map import get_balanced_memory as get_balanced_memory
    from accel_callbacks.offload.device_map import (
        get_module_size_with_ties as get_module_size_with_ties,
    )
    from accel_callbacks.offload.folder import OffloadedWeightsLoader as OffloadedWeightsLoader
    from accel_callbacks.offload.folder import PrefixedDataset as PrefixedDataset
    from accel_callbacks.offload.folder import (
        extract_submodules_state_dict as extract_submodules_state_dict,
    )
    from accel_callbacks.offload.folder import load_offloaded_weight as load_offloaded_weight
    from accel_callbacks.offload.folder import load_offloaded_weights as load_offloaded_weights
    from accel_callbacks.offload.folder import offload_state_dict as offload_state_dict
    from accel_callbacks.offload.folder import offload_weight as offload_weight
    from accel_callbacks.offload.folder import save_offload_index as save_offload_index
    from accel_callbacks.offload.hooks import AlignDevicesHook as AlignDevicesHook
    from accel_callbacks.offload.hooks import CpuOffload as CpuOffload
    from accel_callbacks.offload.hooks import ModelHook as ModelHook
    from accel_callbacks.offload.hooks import SequentialHook as SequentialHook
    from accel_callbacks.offload.hooks import UserCpuOffloadHook as UserCpuOffloadHook
    from accel_callbacks.offload.hooks import add_hook_to_module as add_hook_to_module
    from accel_callbacks.offload.hooks import attach_align_device_hook as attach_align_device_hook
    from accel_callbacks.offload.hooks import (
        attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    )
    from accel_callbacks.offload.hooks import (
        attach_execution_device_hook as attach_execution_device_hook,
    )
    from accel_callbacks.offload.hooks import remove_hook_from_module as remove_hook_from_module
    from accel_callbacks.offload.hooks import (
        remove_hook_from_submodules as remove_hook_from_submodules,
    )
    from accel_callbacks.offload.quantize import BnbQuantizationConfig as BnbQuantizationConfig
    from accel_callbacks.offload.quantize import has_4bit_bnb_layers as has_4bit_bnb_layers
    from accel_callbacks.offload.quantize import load_and_quantize_model as load_and_quantize_model
    from accel_callbacks.offload.sizes import CustomDtype as CustomDtype
    from accel_callbacks.offload.sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from accel_callbacks.offload.sizes import (
        check_tied_parameters_in_config as check_tied_parameters_in_config,
    )
    from accel_callbacks.offload.sizes import compute_module_sizes as compute_module_sizes
    from accel_callbacks.offload.sizes import (
        compute_module_total_buffer_size as compute_module_total_buffer_size,
    )
    from accel_callbacks.offload.sizes import convert_file_size_to_int as convert_file_size_to_int
    from accel_callbacks.offload.sizes import dtype_byte_size as dtype_byte_size
    from accel_callbacks.offload.sizes import find_tied_parameters as find_tied_parameters
    from accel_callbacks.offload.sizes import get_max_layer_size as get_max_layer_size
    from accel_callbacks.offload.sizes import get_module_leaves as get_module_leaves
    from accel_callbacks.offload.sizes import (
        get_non_persistent_buffers as get_non_persistent_buffers,
    )
    from accel_callbacks.offload.sizes import named_module_tensors as named_module_tensors
    from accel_callbacks.offload.tensors import align_module_device as align_module_device
    from accel_callbacks.offload.tensors import (
        get_state_dict_from_offload as get_state_dict_from_offload,
    )
    from accel_callbacks.offload.tensors import (
        get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    )
    from accel_callbacks.offload.tensors import has_offloaded_params as has_offloaded_params
    from accel_callbacks.offload.tensors import id_tensor_storage as id_tensor_storage
    from accel_callbacks.offload.tensors import recursive_getattr as recursive_getattr
    from accel_callbacks.offload.tensors import retie_parameters as retie_parameters
    from accel_callbacks.offload.tensors import (
        set_module_tensor_to_device as set_module_tensor_to_device,
    )
    from accel_callbacks.plugins.deepspeed import (
        get_active_deepspeed_plugin as get_active_deepspeed_plugin,
    )
    from accel_callbacks.plugins.deepspeed_config import HfDeepSpeedConfig as HfDeepSpeedConfig
    from accel_callbacks.plugins.deepspeed_dummies import DummyOptim as DummyOptim
    from accel_callbacks.plugins.deepspeed_dummies import DummyScheduler as DummyScheduler
    from accel_callbacks.utils.fsdp import (
        disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    )
    from accel_callbacks.utils.fsdp import (
        enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    )
    from accel_callbacks.utils.fsdp import fsdp2_prepare_model as fsdp2_prepare_model
    from accel_callbacks.utils.fsdp import load_fsdp_model as load_fsdp_model
    from accel_callbacks.utils.fsdp import load_fsdp_optimizer as load_fsdp_optimizer
    from accel_callbacks.utils.fsdp import merge_fsdp_weights as merge_fsdp_weights
    from accel_callbacks.utils.fsdp import save_fsdp_model as save_fsdp_model
    from accel_callbacks.utils.fsdp import save_fsdp_optimizer as save_fsdp_optimizer
    from accel_callbacks.utils.imports import compare_versions as compare_versions
    from accel_callbacks.utils.imports import is_bf16_available as is_bf16_available
    from accel_callbacks.utils.imports import is_cuda_available as is_cuda_available
    from accel_callbacks.utils.imports import is_fp8_available as is_fp8_available
    from accel_callbacks.utils.imports import is_fp16_available as is_fp16_available
    from accel_callbacks.utils.imports import is_mps_available as is_mps_available
    from accel_callbacks.utils.imports import is_torch_version as is_torch_version
    from accel_callbacks.utils.imports import is_xpu_available as is_xpu_available
    from accel_callbacks.utils.modeling import PrecisionType as PrecisionType
    from accel_callbacks.utils.modeling import (
        extract_model_from_parallel as extract_model_from_parallel,
    )
    from accel_callbacks.utils.modeling import is_compiled_module as is_compiled_module
    from accel_callbacks.utils.operations import TensorInformation as TensorInformation
    from accel_callbacks.utils.operations import concatenate as concatenate
    from accel_callbacks.utils.operations import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel_callbacks.utils.operations import convert_to_fp32 as convert_to_fp32
    from accel_callbacks.utils.operations import find_batch_size as find_batch_size
    from accel_callbacks.utils.operations import find_device as find_device
    from accel_callbacks.utils.operations import get_data_structure as get_data_structure
    from accel_callbacks.utils.operations import get_shape as get_shape
    from accel_callbacks.utils.operations import honor_type as honor_type
    from accel_callbacks.utils.operations import initialize_tensors as initialize_tensors
    from accel_callbacks.utils.operations import is_namedtuple as is_namedtuple
    from accel_callbacks.utils.operations import is_tensor_information as is_tensor_information
    from accel_callbacks.utils.operations import is_torch_tensor as is_torch_tensor
    from accel_callbacks.utils.operations import listify as listify
    from accel_callbacks.utils.operations import pad_input_tensors as pad_input_tensors
    from accel_callbacks.utils.operations import recursively_apply as recursively_apply
    from accel_callbacks.utils.operations import slice_tensors as slice_tensors


_get, _ = lazy_names(__name__, {name: f".{home}" for name, home in _HOME.items()})


def __getattr__(name: str) -> Any:
    if name in _SHARED:
        return getattr(accel_callbacks, name)
    if name not in _HOME:
        from accel_callbacks.utils.imports import available_check

        try:
            return available_check(name)
        except AttributeError:
            pass
    return _get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
