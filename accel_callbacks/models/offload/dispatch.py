"""Move the weights of a model to their places, and attach what fetches the offloaded ones."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import torch

from accel_callbacks.models.compile import refuse_scripted
from accel_callbacks.models.offload.align import unalign
from accel_callbacks.models.offload.assignment import Assignment, Weight
from accel_callbacks.models.offload.origins import Origin, Origins, detach
from accel_callbacks.models.offload.placeholder import AbsentWeight
from accel_callbacks.models.offload.residence import Offload, OffloadOptions, attach
from accel_callbacks.models.offload.source import Stored, StoredWeights
from accel_callbacks.models.offload.spill import spill
from accel_callbacks.models.offload.units import blocks_of, cut_units
from accel_callbacks.terminal_text import listed

__all__ = ["release", "spread"]

Path = str | os.PathLike[str]


def spread(
    model: torch.nn.Module,
    assignment: Assignment,
    origins: Origins,
    folder: Path | None,
    state_dict: Mapping[str, torch.Tensor] | None,
    block_classes: Collection[str] | None,
    options: OffloadOptions,
) -> None:
    """Move all weights to their places; check everything before anything changes."""
    known, skipped = _find_origins(assignment, origins, state_dict or {})
    on_disk = [a.weight for a in assignment.on_disk if a.weight.name not in skipped]
    held = [a.weight for a in assignment.held if a.weight.name not in skipped]
    slots = (slot for weight in (*on_disk, *held) for slot in weight.slots)
    refuse_scripted((slot.module for slot in slots), "offload")
    fresh = {
        weight.name: _as_tensor(known.get(weight.name, weight.tensor))
        for weight in on_disk
        if not isinstance(known.get(weight.name), Stored)
    }
    written = _spill(fresh, folder) if fresh else {}
    release(model)
    with torch.no_grad():
        for assigned in assignment.resident:
            weight = assigned.weight
            if weight.name not in skipped:
                _place(weight, assigned.device, known.get(weight.name))
        values = {
            name: value
            for weight in held
            for value in [_on_host(weight.tensor, known.get(weight.name))]
            for name in weight.names
        }
    stored: dict[str, Stored] = {}
    for weight in on_disk:
        origin = written.get(weight.name) or known[weight.name]
        assert isinstance(origin, Stored)
        stored.update(dict.fromkeys(weight.names, origin))
    if stored or values:
        is_offloaded = {*stored, *values}.__contains__
        units = cut_units(model, is_offloaded, blocks_of(model, block_classes))
        offload = Offload(units, assignment.main, StoredWeights.of(stored), values, options)
        attach(model, offload, units)


def _find_origins(
    assignment: Assignment, origins: Origins, state_dict: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Origin], set[str]]:
    """Return the origins of values that are not in the model, and weights without any.

    Raises:
        ValueError: values are of another model, or a weight of the model is lost.
    """
    known: dict[str, Origin] = {}
    skipped: set[str] = set()
    lost: list[str] = []
    for assigned in assignment.weights:
        weight, origin = assigned.weight, origins.of(assigned)
        if origin is None and assigned.place == "host":
            origin = next((state_dict[name] for name in weight.names if name in state_dict), None)
        if origin is not None:
            _check(weight, origin)
            known[weight.name] = origin
        elif isinstance(weight.tensor, AbsentWeight):
            skipped.add(weight.name)  # it speaks for itself
        elif origins.is_absent(assigned):
            lost.append(weight.name)
    if lost:
        raise ValueError(
            f"{listed(lost)}: on the meta device, without values, and nothing tells where they "
            "are: load the model with load_checkpoint_and_dispatch, or give an offload_index=. "
            "(Of buffers that no checkpoint has, build the model in init_empty_weights(), which "
            "leaves them their values.)"
        )
    return known, skipped


def release(model: torch.nn.Module) -> None:
    """Remove the hooks of an earlier dispatch, and leave placeholders."""
    detach(model)
    unalign(model)
    vars(model).pop("hf_device_map", None)


def _spill(weights: Mapping[str, torch.Tensor], folder: Path | None) -> dict[str, Stored]:
    if folder is None:
        raise ValueError(
            f"offload_dir= is needed: {listed(weights)} are in memory, and go to the disk by the "
            "device_map. (Weights of a checkpoint stay in its own files: use "
            "load_checkpoint_and_dispatch.)"
        )
    stored = spill(weights, folder)
    return {name: stored.at(name) for name in weights}


def _check(weight: Weight, origin: Origin) -> None:
    at = origin.tensor if isinstance(origin, Stored) else origin
    place = f" in {origin.tensor.path}" if isinstance(origin, Stored) else ""
    dtype, wanted = at.dtype, weight.tensor.dtype
    if tuple(at.shape) != tuple(weight.tensor.shape):
        raise ValueError(
            f"{weight.name} is {list(weight.tensor.shape)}, and {list(at.shape)}{place}: these are "
            "the weights of another model."
        )
    if dtype != wanted and not (dtype.is_floating_point and wanted.is_floating_point):
        raise ValueError(f"{weight.name} is {wanted}, and {dtype}{place}.")


def _as_tensor(origin: Origin) -> torch.Tensor:
    return origin.mapped() if isinstance(origin, Stored) else origin.detach()


def _place(weight: Weight, device: torch.device, origin: Origin | None) -> None:
    """Put a weight on its device, as ``Module.to`` does."""
    tensor = weight.tensor
    if origin is None:
        if tensor.device == device:
            return
        moved = tensor.detach().to(device)
        same_type = torch._has_compatible_shallow_copy_type(tensor, moved)
        if weight.is_parameter and same_type:  # an optimizer keeps it
            tensor.data = moved
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(device)
            return
    else:
        moved = _as_tensor(origin).to(device, tensor.dtype, copy=True)
    if weight.is_parameter:
        moved = torch.nn.Parameter(moved, tensor.requires_grad)
    weight.put(moved)


def _on_host(tensor: torch.Tensor, origin: Origin | None) -> torch.Tensor:
    """Return the tensor to hold in host memory."""
    if origin is None:
        return tensor.detach().to("cpu")
    value = _as_tensor(origin)
    return value.to("cpu", tensor.dtype, copy=isinstance(origin, Stored))
