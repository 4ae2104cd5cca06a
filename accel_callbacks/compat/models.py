"""Functions of Accelerate on models: pipelines, compiled regions, shards, fp8, files of weights."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import IO, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.accelerator import Accelerator
from accel_callbacks.checkpoint.tensor_file import save_tensors
from accel_callbacks.compat.state import PartialState
from accel_callbacks.compat.tensors import id_tensor_storage
from accel_callbacks.engines.fsdp.units import find_units
from accel_callbacks.models.compile import compile_model, regions
from accel_callbacks.plugins.compile import TorchDynamoPlugin
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.terminal_text import listed
from checkpoint_io.warning import warn

__all__ = [
    "GatheredParameters",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_model_to_fp8_ao",
    "copy_tensor_to_devices",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "fsdp2_canonicalize_names",
    "fsdp2_prepare_auto_wrap_policy",
    "get_model_tp_size",
    "get_parameters_from_modules",
    "has_ao_layers",
    "has_repeated_blocks",
    "load",
    "load_state_dict",
    "prepare_pippy",
    "save",
]

_FP8_MULTIPLE = 16  # of the sizes of layers that fp8 multiplies


# --- pipelines --------------------------------------------------------------------------------


def prepare_pippy(
    model: torch.nn.Module,
    split_points: str | Sequence[str] | None = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> torch.nn.Module:
    """Cut a model into a stage for each process, for inference; collective.

    Args:
        model: the model; on one process it is returned as it is.
        split_points: names of the modules with which stages begin; ``"auto"`` cuts between blocks
            where stages have as many parameters.
        no_split_module_classes: without effect, since blocks are never split.
        example_args: without effect, since nothing is traced.
        example_kwargs: without effect too.
        num_chunks: micro-batches of a batch; by default as many as processes.
        gather_output: without effect, since outputs are the same on all processes.
    """
    world = PartialState().num_processes
    points = None if isinstance(split_points, str) or split_points is None else list(split_points)
    if world == 1:
        vars(model)["hf_split_points"] = points or []
        return model
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=world))
    pipeline = accelerator.prepare_pipeline(
        model, points, schedule="GPipe", microbatches=num_chunks or world
    )
    vars(pipeline)["hf_split_points"] = points
    return pipeline


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return on all processes the tensor that one of them has; collective.

    Args:
        tensor: the tensor, None on the others.

    Raises:
        ValueError: no process has a tensor.
    """
    shapes = collectives.gather_object(None if tensor is None else (tensor.shape, tensor.dtype))
    source = next((rank for rank, shape in enumerate(shapes) if shape is not None), None)
    if source is None:
        raise ValueError("copy_tensor_to_devices: no process has a tensor; pass it on one.")
    if tensor is None:
        shape, dtype = shapes[source]
        tensor = torch.empty(shape, dtype=dtype, device=PartialState().device)
    return collectives.broadcast(tensor, from_process=source)


# --- compiled regions -------------------------------------------------------------------------


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile the repeated blocks of a model in place, or all of it without such blocks.

    Args:
        module: the model, which is returned.
        **compile_kwargs: of ``torch.compile``.
    """
    options = {"backend": "inductor", **compile_kwargs}
    compile_model(module, TorchDynamoPlugin(use_regional_compilation=True, **options))
    return module


compile_regions_fsdp2 = compile_regions_deepspeed = compile_regions


def has_repeated_blocks(module: torch.nn.Module) -> bool:
    """Return whether a model has blocks that are compiled one by one."""
    return next(regions(module), None) is not None


# --- sharded models ---------------------------------------------------------------------------


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by their names without the parts that wrappers add."""
    wrappers = {"_checkpoint_wrapped_module", "_orig_mod"}
    return {
        ".".join(part for part in name.split(".") if part not in wrappers): parameter
        for name, parameter in named_params.items()
    }


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module
) -> Callable[[torch.nn.Module], bool] | None:
    """Return a function that tells which modules are sharded as units of their own, None if none.

    Raises:
        ValueError: no module has a class that the plugin names.
    """
    units = find_units(model, fsdp2_plugin)
    sharded = {id(module) for unit in units for module in unit.modules}

    def is_unit(module: torch.nn.Module) -> bool:
        # A block whose activations are checkpointed is the same unit.
        return id(getattr(module, "_checkpoint_wrapped_module", module)) in sharded

    return is_unit if sharded else None


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: Any
) -> set[torch.nn.Parameter]:
    """Return the parameters of modules, or of those of a model whose names match an expression.

    Args:
        modules: the modules, or the expression.
        model: the model.
        device: to which modules that match are moved.
    """
    if modules is None:
        return set()
    if isinstance(modules, str):
        expression = re.compile(modules)
        named = model.named_modules()
        chosen = [module.to(device) for name, module in named if expression.fullmatch(name)]
    else:
        chosen = list(modules)
    return {parameter for module in chosen for parameter in module.parameters()}


def get_model_tp_size(model: torch.nn.Module) -> int | None:
    """Return over how many processes transformers has cut a model, None where it has not."""
    size = getattr(model, "tp_size", None)
    if size is not None:
        return int(size)
    options = getattr(getattr(model, "config", None), "distributed_config", None)
    size = (
        options.get("tp_size") if isinstance(options, dict) else getattr(options, "tp_size", None)
    )
    return None if size is None else int(size)


def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Return a block in which parameters of DeepSpeed's third stage are whole; else one of nothing.

    Args:
        params: the parameters.
        modifier_rank: whose changes all others get.
        fwd_module: the module that registers them.
        enabled: gather at all.
    """
    deepspeed: Any = sys.modules.get("deepspeed")  # whoever has such parameters has imported it
    if deepspeed is None or not enabled:
        return nullcontext()
    block: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
    )
    return block


# --- precision --------------------------------------------------------------------------------


def find_first_last_linear_layers(model: torch.nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer."""
    modules = model.named_modules()
    names = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(
    module: torch.nn.Module, fqn: str, layers_to_filter: Sequence[Any]
) -> bool:
    """Return whether a layer may be converted to fp8: by its sizes, and not one of those named."""
    if isinstance(module, torch.nn.Linear) and (
        module.in_features % _FP8_MULTIPLE or module.out_features % _FP8_MULTIPLE
    ):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: torch.nn.Module, fqn: str) -> bool:
    """Return whether a layer may be converted to fp8: by its sizes, and not the first or last."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def has_ao_layers(model: torch.nn.Module) -> bool:
    """Return whether torchao has converted layers of a model to fp8."""
    kind = import_module("torchao.float8.float8_linear").Float8Linear
    return any(isinstance(module, kind) for module in model.modules())


def convert_model_to_fp8_ao(
    model: torch.nn.Module,
    config: Any = None,
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None,
) -> None:
    """Convert linear layers of a model to fp8 in place, by torchao.

    Args:
        model: the model.
        config: a ``Float8LinearConfig``.
        module_filter_func: which layers; by default not the first and the last.
    """
    if module_filter_func is None:
        ends = find_first_last_linear_layers(model)
        module_filter_func = partial(filter_linear_layers, layers_to_filter=ends)
    import_module("torchao.float8").convert_to_float8_training(
        model, module_filter_fn=module_filter_func, config=config
    )


# --- files ------------------------------------------------------------------------------------


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return weights that safetensors can write: each storage once, each tensor contiguous.

    Args:
        state_dict: names to tensors, from which those that share memory are removed.

    Warns:
        UserWarning: there are such tensors; it names them.
    """
    storages: dict[Any, str] = {}
    removed = {}
    for name, tensor in list(state_dict.items()):
        if isinstance(tensor, torch.Tensor):
            first = storages.setdefault(id_tensor_storage(tensor), name)
            if first != name:
                removed[name] = first
                del state_dict[name]
    if removed:
        pairs = listed(f"{name!r} (that of {first!r})" for name, first in removed.items())
        warn(
            f"weights without tensors that share memory with another one: {pairs}. Tie them again "
            "after loading, or write all names by save(), without safe_serialization=True."
        )
    return {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
    }


def save(
    obj: Any,
    f: str | os.PathLike[str],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write a flat dict of tensors as safetensors on the main process; :func:`load` reads it.

    Args:
        obj: names to tensors.
        f: path or URL of the file.
        save_on_each_node: write on one process of each machine.
        safe_serialization: write tensors that share memory once, under the first of their names;
            by default under each. Nothing here writes pickles.

    Raises:
        TypeError: ``obj`` is something else.
    """
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        if safe_serialization and isinstance(obj, Mapping):
            obj = clean_state_dict_for_safetensors(dict(obj))
        save_tensors(obj, f)


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Return what :func:`save`, or ``torch.save`` of plain values and tensors, wrote.

    Args:
        f: path of the file, or the open file.
        map_location: device of the tensors, or a function as ``torch.load`` takes it.
        **kwargs: without effect; pickles are read without running what they hold.

    Raises:
        checkpoint_io.CorruptCheckpointError: the file is damaged, or holds objects of classes.
    """
    from checkpoint_io.weights.foreign.torch_pickle import load_restricted

    if kwargs.get("weights_only") is False:
        warn("weights_only=False has no effect: pickles are read without running what they hold.")
    if isinstance(f, (str, os.PathLike)) and _is_safetensors(f):
        from safetensors.torch import load_file

        weights = load_file(f)
        return {name: _place(tensor, map_location) for name, tensor in weights.items()}
    return load_restricted(f, map_location)


def _place(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    return tensor if map_location is None or callable(map_location) else tensor.to(map_location)


def _is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins as safetensors do: the length of the header, then the header."""
    try:
        with open(path, "rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError:
        return False


def load_state_dict(checkpoint_file: str, device_map: Mapping[str, Any] | None = None) -> Any:
    """Return the weights of a file.

    Args:
        checkpoint_file: of safetensors, or of ``torch.save``.
        device_map: devices by names of modules; what is on none of them stays on the CPU.
    """
    import checkpoint_io

    weights = checkpoint_io.load_model_state(checkpoint_file)
    devices = {name: device for name, device in (device_map or {}).items() if device != "disk"}

    def device_of(name: str) -> Any:
        owners = [owner for owner in devices if owner in ("", name) or name.startswith(f"{owner}.")]
        return devices[max(owners, key=len)] if owners else "cpu"

    return {name: tensor.to(device_of(name)) for name, tensor in weights.items()}
