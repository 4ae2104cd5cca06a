"""Small functions of ``accelerate.utils`` without a state, as scripts call them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import torch

from accel_callbacks.collectives import is_sharded
from accel_callbacks.collectives.nested import find_batch_size
from accel_callbacks.collectives.tensors import NestedTensorWarning
from accel_callbacks.compat.packages import (
    available_check,
    compare_versions,
    is_package_available,
    is_torch_version,
)
from accel_callbacks.compat.state import PartialState
from accel_callbacks.data.device import send_to_device
from accel_callbacks.plugins.distributed_type import DistributedType

__all__ = [
    "CannotPadNestedTensorWarning",
    "convert_bytes",
    "deepspeed_required",
    "do_nothing",
    "get_module_children_bottom_up",
    "get_module_class_from_name",
    "get_pretty_name",
    "get_sampler",
    "has_compiled_regions",
    "ignorant_find_batch_size",
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_amdsmi_available",
    "is_bitsandbytes_multi_backend_available",
    "is_habana_gaudi1",
    "is_import_timer_available",
    "is_numpy_available",
    "is_peft_model",
    "is_pippy_available",
    "is_rocm_available",
    "is_sagemaker_available",
    "is_torch_distributed_available",
    "is_torchdata_stateful_dataloader_available",
    "is_tqdm_available",
    "is_transformer_engine_mxfp8_available",
    "is_weights_only_available",
    "is_xccl_available",
    "merge_dicts",
    "model_has_dtensor",
    "move_to_device",
    "test_launch",
    "torchao_required",
]

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")


# --- values -----------------------------------------------------------------------------------


def merge_dicts(
    source: Mapping[str, Any], destination: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Write the values of a dict and those inside of it over those of another, and return that."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text, in the largest unit of which there is one."""
    power = 0
    while size >= 1024 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{round(size, 2)} {_UNITS[power]}"


def get_pretty_name(obj: Any) -> str:
    """Return the name of a function or class, or of the class of another object."""
    for named in (obj, type(obj)):
        for attribute in ("__qualname__", "__name__"):
            if hasattr(named, attribute):
                return str(getattr(named, attribute))
    return str(obj)


# --- models -----------------------------------------------------------------------------------


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[Any] | None:
    """Return the class of this name of the module or one inside of it, None without one."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return the modules of a model, each after those inside of it, the model last.

    Args:
        model: the model.
        return_fqns: return pairs of name and module instead.
    """
    pairs = list(_bottom_up(model, ""))
    return pairs if return_fqns else [module for _, module in pairs]


def _bottom_up(module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for key, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{key}" if name else key)
    yield name, module


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether parameters of a model are sharded or cut."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Return whether modules inside of a model are compiled."""
    compiled = getattr(getattr(torch, "_dynamo", None), "OptimizedModule", ())
    return any(
        isinstance(part, compiled) or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
        if part is not module
    )


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return whether a model is one of peft."""
    peft = sys.modules.get("peft")  # whoever has such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


# --- data -------------------------------------------------------------------------------------


def get_sampler(dataloader: torch.utils.data.DataLoader[Any]) -> Any:
    """Return the sampler from which a loader's batches come, None for a stream."""
    sampler = getattr(dataloader, "sampler", None)
    batches = sampler if isinstance(sampler, torch.utils.data.BatchSampler) else None
    return getattr(batches or getattr(dataloader, "batch_sampler", None), "sampler", None)


#: Neither raises for structures without tensors.
ignorant_find_batch_size = find_batch_size


def move_to_device(state: Any, device: Any) -> Any:
    """Return the state of an optimizer with its tensors on a device."""
    return send_to_device(state, device)


CannotPadNestedTensorWarning = NestedTensorWarning


# --- decorators, and functions of nothing -----------------------------------------------------


def deepspeed_required(func: F) -> F:
    """Decorate a function to raise where DeepSpeed does not train."""

    @functools.wraps(func)
    def required(*args: Any, **kwargs: Any) -> Any:
        if PartialState().distributed_type != DistributedType.DEEPSPEED:
            raise ValueError(
                f"{func.__name__} is for DeepSpeed: pass the Accelerator a deepspeed_plugin, or "
                "start the script by `accel launch --use_deepspeed`."
            )
        return func(*args, **kwargs)

    return cast(F, required)


def torchao_required(func: F) -> F:
    """Decorate a function to raise where torchao is not installed."""

    @functools.wraps(func)
    def required(*args: Any, **kwargs: Any) -> Any:
        if not is_package_available("torchao"):
            raise ImportError(f"{func.__name__} needs torchao: pip install torchao")
        return func(*args, **kwargs)

    return cast(F, required)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, with any arguments."""


def test_launch() -> None:
    """Check that the processes of a launch find each other."""
    PartialState().wait_for_everyone()


# --- what there is ----------------------------------------------------------------------------


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes is installed."""
    return is_package_available("bitsandbytes")


is_8bit_bnb_available = is_4bit_bnb_available


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata with its StatefulDataLoader is installed."""
    return is_package_available("torchdata") and is_package_available(
        "torchdata.stateful_dataloader"
    )


def is_weights_only_available() -> bool:
    """Return True: ``torch.load`` reads weights only in each torch that this library supports."""
    return True


def is_rocm_available() -> bool:
    """Return whether torch is built for AMD's GPUs and sees one."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_xccl_available() -> bool:
    """Return whether torch has the collectives of Intel's GPUs."""
    is_built = getattr(torch.distributed, "is_xccl_available", None)
    return bool(is_built and is_built())


def is_amdsmi_available() -> bool:
    """Return whether amdsmi is installed."""
    return is_package_available("amdsmi")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes is installed, and knows devices other than NVIDIA's."""
    if not is_package_available("bitsandbytes"):
        return False
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    return "multi_backend" in getattr(bitsandbytes, "features", ())


def is_habana_gaudi1() -> bool:
    """Return whether torch sees a Gaudi of the first generation."""
    if not available_check("is_hpu_available", "habana_frameworks")():
        return False
    tool: Any = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(tool._get_device_type() == tool.synDeviceType.synDeviceGaudi)


def is_import_timer_available() -> bool:
    """Return whether import_timer is installed."""
    return is_package_available("import_timer")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether numpy of a release or a newer one is installed."""
    return compare_versions("numpy", ">=", min_version)


def is_pippy_available() -> bool:
    """Return whether torch has pipelines."""
    return is_torch_version(">=", "2.4.0")


def is_sagemaker_available() -> bool:
    """Return whether sagemaker is installed."""
    return is_package_available("sagemaker")


def is_torch_distributed_available() -> bool:
    """Return whether torch is built for several processes."""
    return torch.distributed.is_available()


def is_tqdm_available() -> bool:
    """Return whether tqdm is installed."""
    return is_package_available("tqdm")


def is_transformer_engine_mxfp8_available() -> bool:
    """Return False: Transformer Engine is not used here."""
    return False
