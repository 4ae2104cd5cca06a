"""Models on several devices, in host memory and on disk, under Accelerate's names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_callbacks._siblings import require_neighbour
from accel_callbacks.offload.residence import DEFAULTS, Offload, OffloadOptions, UnitHook
from accel_callbacks.offload.source import StoredWeights
from accel_callbacks.offload.units import Unit, blocks_of, cut_units, place_of

__all__ = ["load_checkpoint_and_dispatch"]

Place = int | str | torch.device
_OFFLOADED = ("cpu", "disk")


def load_checkpoint_and_dispatch(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Place],
    no_split_module_classes: Sequence[str] | None = None,
    offload_buffers: bool = False,
    strict: bool = False,
    options: OffloadOptions = DEFAULTS,
) -> torch.nn.Module:
    """Load a checkpoint into a model that is spread over devices, host memory and disk.

    What is on disk stays in the checkpoint's own files, and is read while its module runs.

    Args:
        model: the model, on the meta device.
        checkpoint: a path of safetensors files.
        device_map: where each module is.
    """
    main = main_device(device_map)
    resident: dict[torch.device, list[str]] = {}
    held: list[str] = []
    on_disk: set[str] = set()
    for name, tensor in _named_tensors(model):
        place = place_of(name, device_map)
        if isinstance(tensor, torch.nn.Parameter) or offload_buffers:
            if place == "disk":
                on_disk.add(name)
                continue
            if place == "cpu" and main.type != "cpu":
                held.append(name)
                continue
        device = main if place in _OFFLOADED else as_device(place)
        resident.setdefault(device, []).append(name)
    require_neighbour("checkpoint_io")
    import checkpoint_io

    stored = StoredWeights.of_checkpoint(checkpoint) if on_disk else StoredWeights({})
    for device, names in resident.items():
        wanted = set(names)
        checkpoint_io.load_model(
            model, checkpoint, only=wanted.__contains__, strict=False, device=device
        )
    attach(model, stored, {}, on_disk | set(held), main, no_split_module_classes, options)
    vars(model)["hf_device_map"] = dict(device_map)
    return model


def attach(
    model: torch.nn.Module,
    stored: StoredWeights,
    held: Mapping[str, torch.Tensor],
    offloaded: set[str],
    main: torch.device,
    block_classes: Sequence[str] | None = None,
    options: OffloadOptions = DEFAULTS,
) -> Offload:
    """Put placeholders for the offloaded weights, and hooks that bring them.

    Args:
        model: the model.
        stored: weights on disk, by name.
        held: weights in host memory, by name.
        offloaded: names of the weights that are offloaded.
        main: the device where their modules run.
        block_classes: names of the classes that are fetched as a whole.
        options: how weights are fetched.
    """
    units = cut_units(model, offloaded.__contains__, blocks_of(model, block_classes))
    offload = Offload(units, main, stored, held, options)
    needed: dict[int, tuple[torch.nn.Module, list[tuple[int, Unit]]]] = {}
    for index, unit in enumerate(units):
        for module in unit.triggers:
            needed.setdefault(id(module), (module, []))[1].append((index, unit))
    for module, own in needed.values():
        UnitHook(offload, own).attach(module)
    return offload


def main_device(device_map: Mapping[str, Place]) -> torch.device:
    """Return where offloaded modules run: the first accelerator of the map, else the CPU."""
    for place in device_map.values():
        if place not in _OFFLOADED:
            return as_device(place)
    return torch.device("cpu")


def as_device(place: Any) -> torch.device:
    """Return the device of an entry of a device map; numbers are accelerators."""
    if isinstance(place, int):
        kind = torch.accelerator.current_accelerator()
        if kind is None:
            raise ValueError(f"device_map: there is no accelerator {place} here.")
        return torch.device(kind.type, place)
    return torch.device(place)


def _named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
