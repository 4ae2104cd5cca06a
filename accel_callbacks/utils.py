"""Names that scripts import from ``accelerate.utils``, ``.state``, ``.data_loader`` and others.

Each name is imported lazily from the module that defines it. The package also has all names of
``accel_callbacks``, and ``is_<package>_available`` for many packages.
"""

# ruff: noqa: F403 (each star is a module of the table, for type checkers only)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import accel_callbacks
from accel_callbacks._lazy import lazy_names

_HOME = {
    "AlignDevicesHook": "compat.hooks",
    "CpuOffload": "compat.hooks",
    "CustomDtype": "models.offload.sizes",
    "DummyOptim": "plugins.deepspeed_dummies",
    "DummyScheduler": "plugins.deepspeed_dummies",
    "HfDeepSpeedConfig": "plugins.deepspeed_config",
    "LayerwiseCastingHook": "compat.casting",
    "ModelHook": "compat.hooks",
    "OffloadedWeightsLoader": "compat.folder",
    "PrecisionType": "compat.wrappers",
    "PrefixedDataset": "compat.folder",
    "SequentialHook": "compat.hooks",
    "SkipBatchSampler": "data.loader",
    "SkipDataLoader": "data.loader",
    "TensorInformation": "compat.operations",
    "UserCpuOffloadHook": "compat.hooks",
    "add_hook_to_module": "compat.hooks",
    "align_module_device": "compat.tensors",
    "attach_align_device_hook": "compat.hooks",
    "attach_align_device_hook_on_blocks": "compat.hooks",
    "attach_execution_device_hook": "compat.hooks",
    "attach_layerwise_casting_hooks": "compat.casting",
    "calculate_maximum_sizes": "models.offload.sizes",
    "check_device_map": "models.offload.device_map",
    "check_tied_parameters_in_config": "models.offload.sizes",
    "check_tied_parameters_on_same_device": "models.offload.device_map",
    "clean_device_map": "models.offload.device_map",
    "compare_versions": "compat.packages",
    "compute_module_sizes": "models.offload.sizes",
    "compute_module_total_buffer_size": "models.offload.sizes",
    "concatenate": "compat.operations",
    "convert_file_size_to_int": "models.offload.sizes",
    "convert_outputs_to_fp32": "compat.operations",
    "convert_to_fp32": "compat.operations",
    "disable_fsdp_ram_efficient_loading": "compat.fsdp",
    "dtype_byte_size": "models.offload.sizes",
    "enable_fsdp_ram_efficient_loading": "compat.fsdp",
    "extract_model_from_parallel": "compat.wrappers",
    "extract_submodules_state_dict": "compat.folder",
    "fallback_allocate": "compat.device_maps",
    "find_batch_size": "compat.operations",
    "find_device": "compat.operations",
    "find_tied_parameters": "models.offload.sizes",
    "fsdp2_prepare_model": "compat.fsdp",
    "get_active_deepspeed_plugin": "plugins.deepspeed",
    "get_balanced_memory": "models.offload.device_map",
    "get_data_structure": "compat.operations",
    "get_max_layer_size": "models.offload.sizes",
    "get_max_memory": "models.offload.budgets",
    "get_module_leaves": "models.offload.sizes",
    "get_module_size_with_ties": "compat.device_maps",
    "get_non_persistent_buffers": "models.offload.sizes",
    "get_shape": "compat.operations",
    "get_state_dict_from_offload": "compat.tensors",
    "get_state_dict_offloaded_model": "compat.tensors",
    "has_offloaded_params": "compat.tensors",
    "honor_type": "compat.operations",
    "id_tensor_storage": "compat.tensors",
    "initialize_tensors": "compat.operations",
    "is_bf16_available": "compat.packages",
    "is_compiled_module": "compat.wrappers",
    "is_cuda_available": "compat.packages",
    "is_fp16_available": "compat.packages",
    "is_fp8_available": "compat.packages",
    "is_initialized": "distributed.topology",
    "is_mps_available": "compat.packages",
    "is_namedtuple": "compat.operations",
    "is_tensor_information": "compat.operations",
    "is_torch_tensor": "compat.operations",
    "is_torch_version": "compat.packages",
    "is_xpu_available": "compat.packages",
    "listify": "compat.operations",
    "load_fsdp_model": "compat.fsdp",
    "load_fsdp_optimizer": "compat.fsdp",
    "load_offloaded_weight": "compat.folder",
    "load_offloaded_weights": "compat.folder",
    "merge_fsdp_weights": "compat.fsdp",
    "named_module_tensors": "models.offload.sizes",
    "offload_state_dict": "compat.folder",
    "offload_weight": "compat.folder",
    "pad_input_tensors": "compat.operations",
    "recursive_getattr": "compat.tensors",
    "recursively_apply": "compat.operations",
    "remove_hook_from_module": "compat.hooks",
    "remove_hook_from_submodules": "compat.hooks",
    "retie_parameters": "compat.tensors",
    "save_fsdp_model": "compat.fsdp",
    "save_fsdp_optimizer": "compat.fsdp",
    "save_offload_index": "compat.folder",
    "set_module_tensor_to_device": "compat.tensors",
    "should_reduce_batch_size": "addons.tuning.executable_batch_size",
    "slice_tensors": "compat.operations",
}
#: Packages of which Accelerate has a function ``is_..._available``, by the name in it.
_PACKAGES = {
    **{
        name: name
        for name in (
            *("aim", "boto3", "clearml", "comet_ml", "datasets", "deepspeed", "dvclive"),
            *("matplotlib", "mlflow", "msamp", "pandas", "peft", "pynvml", "pytest", "rich"),
            *("schedulefree", "swanlab", "tensorboard", "timm", "torch_xla", "torchao"),
            *("torchdata", "torchvision", "trackio", "transformer_engine", "transformers"),
            *("triton", "wandb"),
        )
    },
    "bnb": "bitsandbytes",
    "hpu": "habana_frameworks",
    "lomo": "lomo_optim",
    "megatron_lm": "megatron",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "neuron": "torch_neuronx",
    "npu": "torch_npu",
    "sdaa": "torch_sdaa",
}
_SHARED = [name for name in accel_callbacks.__all__ if name != "__version__"]
_CHECKS = {f"is_{short}_available": package for short, package in _PACKAGES.items()}

__all__ = sorted([*_HOME, *_SHARED, *_CHECKS])

# Type checkers see what the modules of the table have, so that no name is listed twice.
if TYPE_CHECKING:
    from accel_callbacks import *
    from accel_callbacks.addons.tuning.executable_batch_size import *
    from accel_callbacks.compat.casting import *
    from accel_callbacks.compat.device_maps import *
    from accel_callbacks.compat.device_maps import fallback_allocate as fallback_allocate
    from accel_callbacks.compat.device_maps import (
        get_module_size_with_ties as get_module_size_with_ties,
    )
    from accel_callbacks.compat.folder import *
    from accel_callbacks.compat.fsdp import *
    from accel_callbacks.compat.hooks import *
    from accel_callbacks.compat.operations import *
    from accel_callbacks.compat.packages import *
    from accel_callbacks.compat.tensors import *
    from accel_callbacks.compat.wrappers import *
    from accel_callbacks.data.loader import *
    from accel_callbacks.data.loader import SkipBatchSampler as SkipBatchSampler
    from accel_callbacks.data.loader import SkipDataLoader as SkipDataLoader
    from accel_callbacks.distributed.topology import *
    from accel_callbacks.models.offload.budgets import *
    from accel_callbacks.models.offload.device_map import *
    from accel_callbacks.models.offload.sizes import *
    from accel_callbacks.plugins.deepspeed import *
    from accel_callbacks.plugins.deepspeed_config import *
    from accel_callbacks.plugins.deepspeed_dummies import *


_get, _ = lazy_names(__name__, {name: f".{home}" for name, home in _HOME.items()})


def __getattr__(name: str) -> Any:
    if name in _SHARED:
        return getattr(accel_callbacks, name)
    if name in _CHECKS:
        from accel_callbacks.compat.packages import available_check

        return available_check(name, _CHECKS[name])
    return _get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
