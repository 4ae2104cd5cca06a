"""The units of a dispatched model: weights fetched together, and the modules that need them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from accel_callbacks.models.compile import regions
from accel_callbacks.models.offload.placeholder import AbsentWeight
from accel_callbacks.models.offload.sizes import class_names
from accel_callbacks.models.offload.slots import Slot

__all__ = ["FetchUnit", "blocks_of", "cut_units", "place_of"]

_Place = TypeVar("_Place")

# Their forward uses the weights of modules in them without calling these.
_WHOLE = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer,
)


@dataclass(eq=False)
class FetchUnit:
    """Weights that are fetched together.

    Args:
        name: of the module that needs it.
        slots: the places of each weight, by its name; tied ones have several.
        triggers: the modules that need it while they run.
        scoped: other units run while it is in use: the own tensors of a module with blocks in it.
        placeholders: what is in the slots while the weights are not, by name.
    """

    name: str
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    triggers: list[torch.nn.Module] = field(default_factory=list)
    scoped: bool = False
    placeholders: dict[str, AbsentWeight] = field(default_factory=dict)


def blocks_of(model: torch.nn.Module, classes: Collection[str] | str | None = None) -> set[int]:
    """Return the ``id`` of each module that is fetched as a whole.

    Args:
        model: the model.
        classes: names of classes, besides those in ``_no_split_modules``, or else the blocks that
            the model repeats.
    """
    own_classes: set[str] = set()
    for module in model.modules():
        own_classes.update(getattr(module, "_no_split_modules", None) or ())
    names = class_names(classes) | own_classes
    whole = {id(module) for module in model.modules() if type(module).__name__ in names}
    return whole if own_classes else whole.union(map(id, regions(model)))


def cut_units(
    model: torch.nn.Module, is_offloaded: Callable[[str], bool], blocks: Collection[int]
) -> list[FetchUnit]:
    """Return the units of a model in its order.

    Args:
        model: the model.
        is_offloaded: tells for the name of a tensor.
        blocks: the ``id`` of each module that is fetched as a whole.
    """
    places: dict[int, tuple[str, list[Slot], list[tuple[str, torch.nn.Module, bool]]]] = {}
    for trigger, scoped, name, slot, tensor in _visit(model, "", is_offloaded, blocks):
        _, slots, triggers = places.setdefault(id(tensor), (name, [], []))
        slots.append(slot)
        if all(trigger[1] is not known for _, known, _ in triggers):
            triggers.append((*trigger, scoped))
    units: dict[tuple[int, ...], FetchUnit] = {}
    for name, slots, triggers in places.values():
        key = tuple(id(module) for _, module, _ in triggers)
        if key not in units:
            units[key] = FetchUnit(
                " and ".join(trigger for trigger, _, _ in triggers),
                triggers=[module for _, module, _ in triggers],
                scoped=any(scoped for _, _, scoped in triggers),
            )
        units[key].slots[name] = slots
    return list(units.values())


_Found = tuple[tuple[str, torch.nn.Module], bool, str, Slot, torch.Tensor]


def _visit(
    module: torch.nn.Module,
    name: str,
    is_offloaded: Callable[[str], bool],
    blocks: Collection[int],
) -> Iterator[_Found]:
    """Yield each offloaded tensor with the module that needs it."""
    whole = id(module) in blocks or not module._modules or isinstance(module, _WHOLE)
    for prefix, owner in module.named_modules(prefix=name) if whole else [(name, module)]:
        for key, slot, tensor in _own(owner):
            full = f"{prefix}.{key}" if prefix else key
            if is_offloaded(full):
                yield (name, module), not whole, full, slot, tensor
    if not whole:
        for child_name, child in module.named_children():
            inner = f"{name}.{child_name}" if name else child_name
            yield from _visit(child, inner, is_offloaded, blocks)


def _own(module: torch.nn.Module) -> Iterator[tuple[str, Slot, torch.Tensor]]:
    for slots, is_parameter in ((module._parameters, True), (module._buffers, False)):
        for key, tensor in slots.items():
            if tensor is not None:
                yield key, Slot(module, key, is_parameter), tensor


def place_of(name: str, device_map: Mapping[str, _Place]) -> _Place | None:
    """Return the place of a tensor in a device map, by its longest prefix."""
    prefix = name
    while prefix and prefix not in device_map:
        prefix = prefix.rpartition(".")[0]
    return device_map.get(prefix)
