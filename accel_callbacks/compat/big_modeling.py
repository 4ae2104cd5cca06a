"""Models on several devices, in host memory and on disk, under Accelerate's names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from accel_callbacks.compat.folder import Index, stored_in_index
from accel_callbacks.compat.views import put_views, remove_views
from accel_callbacks.models.compile import original
from accel_callbacks.models.load import dtype_rule, load_checkpoint_in_model
from accel_callbacks.models.offload.align import align, guard_moves
from accel_callbacks.models.offload.assignment import (
    Assignment,
    Place,
    as_device,
    assign,
    assign_all,
)
from accel_callbacks.models.offload.checkpoint_weights import load_spread
from accel_callbacks.models.offload.device_map import planned_device_map
from accel_callbacks.models.offload.dispatch import release, spread
from accel_callbacks.models.offload.origins import Origins
from accel_callbacks.models.offload.residence import DEFAULTS, OffloadOptions, offload_hooks
from accel_callbacks.models.offload.sizes import class_names

__all__ = ["cpu_offload", "disk_offload", "dispatch_model", "load_checkpoint_and_dispatch"]

Path = str | os.PathLike[str]
Model = TypeVar("Model", bound=torch.nn.Module)


def load_checkpoint_and_dispatch(
    model: Model,
    checkpoint: Path,
    device_map: str | Mapping[str, Place] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: Path | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    keep_in_fp32_modules: Sequence[str] | None = None,
    mapped: bool = False,
    keep_trainable: bool | None = None,
    options: OffloadOptions = DEFAULTS,
) -> Model:
    """Load a checkpoint into a model that is spread over devices, host memory and disk.

    Weights on disk stay in the checkpoint's own files of safetensors, and are read from there while
    their block runs, the next block ahead. All results are those of the model in memory.

    Args:
        model: the model, usually built in :func:`init_empty_weights`.
        checkpoint: what :func:`load_checkpoint_in_model` takes.
        device_map: where modules are, as name to device, ``"cpu"`` or ``"disk"``; or how to plan
            it: ``"auto"``, ``"balanced"``, ``"balanced_low_0"`` or ``"sequential"``. By default the
            model is loaded as it is, one with offloaded weights by the map that it has.
        max_memory: budgets of a plan, as device to bytes or text such as ``"8GB"``.
        no_split_module_classes: names of classes whose modules are never split over devices, and
            are fetched as a whole.
        offload_folder: where weights on disk are written that are not in local safetensors; else
            not needed.
        offload_buffers: offload persistent buffers with the parameters.
        dtype: a floating-point dtype, or its name, for the weights. What is on disk is converted
            each time, unless it is stored so.
        offload_state_dict: accepted for Accelerate; no state dict is made.
        skip_keys: keys of inputs and outputs that are not moved between devices.
        preload_module_classes: names of further classes that are fetched as a whole, since they use
            the weights of their children directly.
        force_hooks: move inputs even if all of the model is on one device.
        strict: raise for missing or unexpected names instead of warning.
        full_state_dict: accepted for Accelerate.
        broadcast_from_rank0: only rank 0 reads; with one device for all of the model.
        keep_in_fp32_modules: names of modules that stay in float32 whatever ``dtype`` is.
        mapped: weights on the CPU are views of the mapped files, as with Accelerate: see
            :func:`load_checkpoint_in_model`.
        keep_trainable: parameters that require a gradient stay on their device whatever the map
            says. By default they do if more bytes of the model are frozen than not, as those of an
            adapter.
        options: how offloaded weights are fetched.

    Returns:
        The model.

    Raises:
        ValueError: the map does not cover the model, or an argument is invalid.
        checkpoint_io.CheckpointError: weights are missing, damaged, or do not fit the model.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import Accelerator, init_empty_weights
        >>> from accel_callbacks import load_checkpoint_and_dispatch
        >>> trained, folder = torch.nn.Linear(2, 2), tempfile.mkdtemp()
        >>> Accelerator(cpu=True).save_model(trained, folder)
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(2, 2)
        >>> model = load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"})
        >>> torch.equal(model(torch.ones(2)), trained(torch.ones(2)))
        True
    """
    if device_map is None and not broadcast_from_rank0 and any(offload_hooks(model)):
        device_map = vars(original(model)).get("hf_device_map")
    if isinstance(device_map, str):
        device_map = planned_device_map(
            original(model), device_map, max_memory, no_split_module_classes, dtype, offload_buffers
        )
    if device_map is None or broadcast_from_rank0:
        load_checkpoint_in_model(
            model,
            checkpoint,
            device_map=device_map,
            offload_folder=offload_folder,
            dtype=dtype,
            offload_buffers=offload_buffers,
            keep_in_fp32_modules=keep_in_fp32_modules,
            strict=strict,
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
            mapped=mapped,
        )
    else:
        load_spread(
            original(model),
            checkpoint,
            device_map,
            dtype_rule(dtype, keep_in_fp32_modules),
            offload_folder,
            offload_buffers,
            strict,
            mapped,
        )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=list(
            class_names(no_split_module_classes) | class_names(preload_module_classes)
        ),
        force_hooks=force_hooks,
        keep_trainable=keep_trainable,
        options=options,
    )


def dispatch_model(
    model: Model,
    device_map: Mapping[str, Place],
    main_device: Place | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: Path | None = None,
    offload_index: Index | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    *,
    keep_trainable: bool | None = None,
    options: OffloadOptions = DEFAULTS,
) -> Model:
    """Spread a model over devices, host memory and disk; fetch offloaded weights in forward.

    Weights that are in memory and go to the disk are written once, into a subfolder of
    ``offload_dir`` that is theirs. Those on the meta device are read from where they are: the
    checkpoint of :func:`load_checkpoint_in_model`, ``offload_index``, or the index in
    ``offload_dir``. A dispatched model may be dispatched again.

    Args:
        model: the model.
        device_map: names of modules or tensors to devices, ``"cpu"`` or ``"disk"``.
        main_device: where offloaded modules run; by default the first accelerator of the map, else
            the CPU.
        state_dict: weights that are held in host memory, by name, in place of the model's own.
        offload_dir: where weights on disk are, or are written.
        offload_index: where weights on disk are, as of Accelerate: name to ``safetensors_file`` and
            ``weight_name``, or to ``dtype`` and ``shape`` of a file in ``offload_dir``.
        offload_buffers: offload persistent buffers with the parameters.
        skip_keys: keys of inputs and outputs that are not moved between devices.
        preload_module_classes: names of classes that are fetched as a whole, besides the model's
            blocks.
        force_hooks: move inputs even if all of the model is on one device.
        keep_trainable: parameters that require a gradient stay on their device whatever the map
            says. By default they do if more bytes of the model are frozen than not.
        options: how offloaded weights are fetched.

    Returns:
        The model, with the map as ``hf_device_map``.

    Raises:
        ValueError: the map does not cover the model, a weight has no values, or there is no folder
            for weights in memory that go to the disk.
        WeightReadError: a file of weights is missing or not what the index says.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import dispatch_model
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        >>> before = model(torch.ones(1))
        >>> model = dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tempfile.mkdtemp())
        >>> model[1].weight
        AbsentWeight(1.weight, on disk, shape=(1, 1), dtype=torch.float32)
        >>> torch.equal(model(torch.ones(1)), before)
        True
    """
    inner = original(model)
    assignment = assign(inner, device_map, main_device, offload_buffers, keep_trainable)
    index = None if offload_index is None else stored_in_index(offload_index, offload_dir)
    origins = Origins(inner, assignment.weights, index, partial(stored_in_index, None, offload_dir))
    is_hooked = assignment.several or force_hooks
    is_resident = not assignment.held and not assignment.on_disk
    if is_resident and not is_hooked and not any(map(origins.is_absent, assignment.weights)):
        release(inner)
        model.to(assignment.weights[0].device if assignment.weights else assignment.main)
    else:
        spread(inner, assignment, origins, offload_dir, state_dict, preload_module_classes, options)
    if is_hooked:
        _hook(inner, assignment, offload_buffers, skip_keys)
    else:
        remove_views(inner)
    vars(inner)["hf_device_map"] = dict(device_map)
    return model


def _hook(
    model: torch.nn.Module,
    assignment: Assignment,
    offload_buffers: bool,
    skip_keys: str | Sequence[str] | None = None,
) -> None:
    """Move inputs to the devices of modules, and mark the model as dispatched."""
    align(model, assignment, skip_keys)
    guard_moves(model)
    put_views(model, assignment.main, offload_buffers)


def cpu_offload(
    model: Model,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    *,
    keep_trainable: bool | None = None,
    options: OffloadOptions = DEFAULTS,
) -> Model:
    """Keep the parameters of a model in host memory, and copy them to a device in forward.

    Args:
        model: the model.
        execution_device: where it runs; by default the device of its first parameter.
        offload_buffers: hold persistent buffers there, too.
        state_dict: the weights that are held, by name, in place of the model's own.
        preload_module_classes: names of classes that are fetched as a whole, besides the model's
            blocks.
        keep_trainable: see :func:`dispatch_model`.
        options: how offloaded weights are fetched.

    Returns:
        The model.

    Raises:
        ValueError: a weight has no values.

    Example:
        >>> import torch
        >>> from accel_callbacks import cpu_offload
        >>> model = cpu_offload(torch.nn.Linear(1, 1))
        >>> model.weight
        AbsentWeight(weight, in host memory, shape=(1, 1), dtype=torch.float32)
        >>> model(torch.ones(1)).shape
        torch.Size([1])
    """
    return _offload_all(
        model,
        "host",
        execution_device,
        offload_buffers,
        state_dict,
        preload_module_classes,
        keep_trainable,
        options,
        None,
    )


def disk_offload(
    model: Model,
    offload_dir: Path,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    *,
    keep_trainable: bool | None = None,
    options: OffloadOptions = DEFAULTS,
) -> Model:
    """Keep the parameters of a model on disk, and read them in forward.

    Those in memory are written once, into a subfolder that is theirs: two models share no files,
    and the same weights are not written twice. Those on the meta device are read from the folder.

    Args:
        model: the model.
        offload_dir: where weights are, or are written.
        execution_device: where it runs; by default the device of its first parameter.
        offload_buffers: offload persistent buffers with the parameters.
        preload_module_classes: names of classes that are fetched as a whole, besides the model's
            blocks.
        keep_trainable: see :func:`dispatch_model`.
        options: how offloaded weights are fetched.

    Returns:
        The model.

    Raises:
        ValueError: a weight has no values.
        WeightReadError: a file of weights is missing or not what the index says.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import disk_offload
        >>> model = torch.nn.Linear(1, 1)
        >>> before = model(torch.ones(1))
        >>> torch.equal(disk_offload(model, tempfile.mkdtemp())(torch.ones(1)), before)
        True
    """
    return _offload_all(
        model,
        "disk",
        execution_device,
        offload_buffers,
        None,
        preload_module_classes,
        keep_trainable,
        options,
        offload_dir,
    )


def _offload_all(
    model: Model,
    place: str,
    execution_device: Place | None,
    offload_buffers: bool,
    state_dict: Mapping[str, torch.Tensor] | None,
    block_classes: Sequence[str] | None,
    keep_trainable: bool | None,
    options: OffloadOptions,
    folder: Path | None,
) -> Model:
    inner = original(model)
    device = _device_of(inner) if execution_device is None else as_device(execution_device)
    assignment = assign_all(inner, place, device, offload_buffers, keep_trainable)
    origins = Origins(inner, assignment.weights, None, partial(stored_in_index, None, folder))
    spread(inner, assignment, origins, folder, state_dict, block_classes, options)
    _hook(inner, assignment, offload_buffers)
    return model


def _device_of(model: torch.nn.Module) -> torch.device:
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    return torch.device("cpu")
