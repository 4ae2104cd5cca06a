"""Assign each weight of a model a place by a device map, and a device to compute on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from accel_callbacks.distributed.topology import own_accelerator
from accel_callbacks.models.offload.device_map import check_device_map
from accel_callbacks.models.offload.slots import Slot
from accel_callbacks.models.offload.units import place_of

__all__ = [
    "Assignment",
    "Place",
    "Weight",
    "WeightPlacement",
    "as_device",
    "assign",
    "assign_all",
    "device_of",
    "weights_of",
]

Place: TypeAlias = int | str | torch.device
_UNIFIED = ("cpu", "mps")  # main devices for which a weight in host memory is not moved


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of a model, with all of its names and slots in modules.

    Args:
        names: in the order of the model; a tied one has several.
        slots: where modules have it.
        tensor: what is there.
        persistent: it is part of the state dict.
    """

    names: tuple[str, ...]
    slots: tuple[Slot, ...]
    tensor: torch.Tensor
    persistent: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        """True for a parameter, False for a buffer."""
        return self.slots[0].is_parameter

    def put(self, tensor: torch.Tensor) -> Weight:
        """Put a tensor into all slots; return the weight with it."""
        for slot in self.slots:
            slot.put(tensor)
        return replace(self, tensor=tensor)


def weights_of(model: torch.nn.Module) -> list[Weight]:
    """Return the parameters and buffers of a model, tied ones once."""
    names: dict[int, list[str]] = {}
    slots: dict[int, dict[tuple[int, str], Slot]] = {}
    tensors: dict[int, torch.Tensor] = {}
    persistent: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for owner, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for key, tensor in owner.items():
                if tensor is None:
                    continue
                mark = id(tensor)
                tensors[mark] = tensor
                names.setdefault(mark, []).append(f"{prefix}.{key}" if prefix else key)
                slots.setdefault(mark, {})[id(module), key] = Slot(module, key, is_parameter)
                if is_parameter or key not in module._non_persistent_buffers_set:
                    persistent.add(mark)
    return [
        Weight(tuple(names[mark]), tuple(slots[mark].values()), tensor, mark in persistent)
        for mark, tensor in tensors.items()
    ]


@dataclass(frozen=True)
class WeightPlacement:
    """The storage of a weight, and the device that it computes on.

    Args:
        weight: the weight.
        place: ``"disk"``, ``"host"`` (held there, and fetched from there), or ``"resident"``.
        device: where it is used; a resident one is there always.
    """

    weight: Weight
    place: str
    device: torch.device


@dataclass(frozen=True)
class Assignment:
    """The places of the weights of a model.

    Args:
        weights: all of them, in the order of the model.
        main: the device where modules with offloaded weights run.
        several: the map has more than one place, or the disk: inputs are moved.
    """

    weights: Sequence[WeightPlacement]
    main: torch.device
    several: bool

    @property
    def resident(self) -> Sequence[WeightPlacement]:
        """Weights that stay on their device."""
        return [assigned for assigned in self.weights if assigned.place == "resident"]

    @property
    def held(self) -> Sequence[WeightPlacement]:
        """Weights in host memory that are fetched from there."""
        return [assigned for assigned in self.weights if assigned.place == "host"]

    @property
    def on_disk(self) -> Sequence[WeightPlacement]:
        """Weights that are fetched from files."""
        return [assigned for assigned in self.weights if assigned.place == "disk"]


def assign(
    model: torch.nn.Module,
    device_map: Mapping[str, Place],
    main_device: Place | None = None,
    offload_buffers: bool = False,
    keep_trainable: bool | None = False,
) -> Assignment:
    """Return the places of the weights of a model.

    A tied weight is in one place: on a device rather than offloaded, and the first of several
    devices, where all modules that share it run then.

    Args:
        model: the model.
        device_map: names of modules or tensors to places.
        main_device: where offloaded modules run; the first accelerator of the map, else the CPU.
        offload_buffers: offload persistent buffers, too.
        keep_trainable: parameters that require a gradient stay on their device; if None, in
            models that are frozen for the most part.

    Raises:
        ValueError: the map leaves tensors out, or names a device that is not there.
    """
    _check(model, device_map)
    places = {name: _as_place(place) for name, place in device_map.items()}
    main = _main_device(places, main_device)
    weights = weights_of(model)
    if keep_trainable is None:
        keep_trainable = _is_mostly_frozen(weights)

    def wanted(weight: Weight, name: str) -> WeightPlacement:
        place = place_of(name, places)
        if place is None:  # a non-persistent buffer, which a map need not name
            place = main
        device = main if place in ("cpu", "disk") else as_device(place)
        offloaded = place == "disk" or (place == "cpu" and main.type not in _UNIFIED)
        if not offloaded or not _may_offload(weight, offload_buffers, keep_trainable):
            return WeightPlacement(weight, "resident", device)
        return WeightPlacement(weight, "disk" if place == "disk" else "host", device)

    assignments: list[WeightPlacement] = []
    followed: dict[int, torch.device] = {}  # modules whose tied weight is elsewhere
    for weight in weights:
        # A tied weight is one tensor: where one of its names is resident, all of them are.
        options = [wanted(weight, name) for name in weight.names]
        best = next((assigned for assigned in options if assigned.place == "resident"), options[0])
        assignments.append(best)
        if best.place == "resident" and any(assigned.device != best.device for assigned in options):
            followed.update((id(slot.module), best.device) for slot in weight.slots)
    # A module runs on one device: its other weights follow the tied one there.
    for index, assigned in enumerate(assignments):
        devices = [followed.get(id(slot.module)) for slot in assigned.weight.slots]
        if len(devices) == 1 and devices[0] is not None and devices[0] != assigned.device:
            assignments[index] = WeightPlacement(assigned.weight, "resident", devices[0])
    distinct = {str(place) for place in places.values()}
    return Assignment(assignments, main, len(distinct) > 1 or "disk" in distinct)


def _check(model: torch.nn.Module, device_map: Any) -> None:
    if not isinstance(device_map, Mapping):
        raise ValueError(
            f'device_map={device_map!r} is no mapping of names to devices such as {{"": "cpu"}}; '
            'only load_checkpoint_and_dispatch takes "auto" and the like.'
        )
    check_device_map(model, device_map)


def _as_place(place: Any) -> Place:
    """Return "cpu", "disk" or a device."""
    if place == "disk":
        return "disk"
    device = as_device(place)
    return "cpu" if device.type == "cpu" else device


def _main_device(places: Mapping[str, Place], main_device: Place | None) -> torch.device:
    if main_device is not None:
        if main_device == "disk":
            raise ValueError('main_device="disk": modules do not run there; name a device.')
        return as_device(main_device)
    for place in places.values():
        if isinstance(place, torch.device):
            return place
    return torch.device("cpu")


def device_of(place: Place) -> torch.device:
    """Return a device; a number is that of an accelerator."""
    if not isinstance(place, int):
        return torch.device(place)
    kind = own_accelerator()
    if kind is None:
        raise ValueError(f'there is no accelerator {place} on this machine; "cpu" is the CPU')
    return torch.device(kind.type, place)


def as_device(place: Any) -> torch.device:
    """Return the device of an entry of a device map; numbers are accelerators.

    Raises:
        ValueError: it is none, or there is no accelerator.
    """
    if isinstance(place, bool):
        place = str(place)
    try:
        device = device_of(place)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f'device_map: {place!r} is no device: use 0, "cuda:1", "cpu" or "disk"'
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")
    module: Any = getattr(torch, device.type, None)
    if device.index is None and hasattr(module, "current_device"):  # tensors there have an index
        return torch.device(device.type, module.current_device())
    return device


def _may_offload(weight: Weight, offload_buffers: bool, keep_trainable: bool) -> bool:
    """Return whether a weight may be elsewhere while its module does not run."""
    if weight.is_parameter:
        return not (keep_trainable and weight.tensor.requires_grad)
    # No file has a buffer that is not in the state dict.
    return offload_buffers and weight.persistent


def _is_mostly_frozen(weights: Sequence[Weight]) -> bool:
    """Return whether more bytes are frozen than not: then the rest is to be trained."""
    trained = frozen = 0
    for weight in weights:
        if weight.is_parameter:
            nbytes = weight.tensor.numel() * weight.tensor.element_size()
            trained += nbytes * weight.tensor.requires_grad
            frozen += nbytes * (not weight.tensor.requires_grad)
    return frozen > trained


def assign_all(
    model: torch.nn.Module,
    place: str,
    device: torch.device,
    offload_buffers: bool = False,
    keep_trainable: bool | None = False,
) -> Assignment:
    """Assign all weights of a model to host memory, or to disk.

    Args:
        model: the model.
        place: ``"host"`` or ``"disk"``.
        device: where it runs.
        offload_buffers: offload persistent buffers, too.
        keep_trainable: see :func:`assign`.
    """
    weights = weights_of(model)
    if keep_trainable is None:
        keep_trainable = _is_mostly_frozen(weights)
    placements = [
        WeightPlacement(
            weight,
            place if _may_offload(weight, offload_buffers, keep_trainable) else "resident",
            device,
        )
        for weight in weights
    ]
    return Assignment(placements, device, True)
