"""The hooks that bring offloaded weights to the modules of a model, put there and taken away."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeAlias

import torch

from accel_callbacks.offload import residence
from accel_callbacks.offload.residence import DEFAULTS, Offload, OffloadOptions, offload_hooks
from accel_callbacks.offload.source import (
    FileIdentity,
    StoredTensor,
    StoredWeights,
    WeightReadError,
)
from accel_callbacks.offload.units import blocks_of, cut_units

__all__ = ["Origin", "Stored", "attach", "blocks", "detach", "origins", "stored_by_name"]

_NOTED = "_stored_weights"
_ORIGIN = "_stored_at"


class Stored(NamedTuple):
    """A weight in a file, with the version of the file.

    Args:
        tensor: where it is.
        identity: of the file.
    """

    tensor: StoredTensor
    identity: FileIdentity


#: Where the values of a weight that is not in its slot are.
Origin: TypeAlias = "Stored | torch.Tensor"


def blocks(model: torch.nn.Module, classes: Collection[str] | None = None) -> set[int]:
    """Return the ``id`` of each module whose weights are fetched together.

    Args:
        model: the model.
        classes: names of classes, besides those that the model names or repeats.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.attachment import blocks
        >>> model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)))
        >>> blocks(model, ["Linear"]) == {id(model[0][0])}
        True
    """
    wanted = {classes} if isinstance(classes, str) else set(classes or ())
    named = {id(one) for one in model.modules() if type(one).__name__ in wanted}
    return blocks_of(model) | named


def attach(
    model: torch.nn.Module,
    stored: StoredWeights,
    held: Mapping[str, torch.Tensor],
    offloaded: Collection[str],
    main: torch.device,
    block_classes: Collection[str] | None = None,
    options: OffloadOptions = DEFAULTS,
) -> Offload:
    """Put placeholders for the offloaded weights, and hooks that bring them.

    Args:
        model: the model.
        stored: weights on disk, by name.
        held: weights in host memory, by name.
        offloaded: names of the weights that are offloaded.
        main: the device where their modules run.
        block_classes: names of classes that are fetched as a whole, besides the model's blocks.
        options: how weights are fetched.
    """
    units = cut_units(model, set(offloaded).__contains__, blocks(model, block_classes))
    offload = Offload(units, main, stored, held, options)
    residence.attach(model, offload, units)
    return offload


def origins(model: torch.nn.Module) -> dict[int, Origin]:
    """Return where the values of a dispatched model's placeholders are, by their ``id``.

    Modules may have got other names since: the slots count.
    """
    found: dict[int, Origin] = {}
    for hook in offload_hooks(model):
        for _, unit in hook.units:
            for name, stands in unit.placeholders.items():
                held = hook.offload.held.get(name)
                if held is not None:
                    found[id(stands)] = held
                else:
                    stored = hook.offload.stored
                    tensor = stored.tensors[name]
                    found[id(stands)] = Stored(tensor, stored.identities[tensor.path])
    noted: StoredWeights | None = vars(model).get(_NOTED)
    if noted is not None:
        for name, parameter in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            if (tensor_at := noted.tensors.get(name)) is not None:
                stands_at = Stored(tensor_at, noted.identities[tensor_at.path])
                found.setdefault(id(parameter), stands_at)
    return found


def note_origin(tensor: torch.Tensor, stored: StoredWeights, name: str) -> None:
    """Keep with a tensor where its values were read, so that they need not be written."""
    at = stored.tensors[name]
    vars(tensor)[_ORIGIN] = Stored(at, stored.identities[at.path])


def noted_origin(tensor: torch.Tensor) -> Stored | None:
    """Return where a tensor's values are in a file; None if they are others by now."""
    found: Stored | None = vars(tensor).get(_ORIGIN)
    if found is None:
        return None
    try:
        value = stored_by_name({"": found}).mapped("").to(tensor.dtype)
    except WeightReadError:
        return None
    return found if same_bits(tensor, value) else None


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype have the same bits.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.attachment import same_bits
        >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
    """
    from checkpoint_io.format.safetensors import as_bytes

    parts = [as_bytes(one.detach().to("cpu").contiguous()) for one in (one, other)]
    return torch.equal(*parts)


def note(model: torch.nn.Module, stored: StoredWeights) -> None:
    """Keep with a model where the weights of its placeholders are, until it is dispatched."""
    vars(model)[_NOTED] = stored


def detach(model: torch.nn.Module) -> None:
    """Remove the hooks that bring weights, and leave the placeholders."""
    vars(model).pop(_NOTED, None)
    for hook in list(offload_hooks(model)):
        hook.detach()
    for module in model.modules():
        if (guard := vars(module).get("_offload_guard")) is not None:
            guard.off()


def stored_by_name(found: Mapping[str, Stored]) -> StoredWeights:
    """Return stored weights by name.

    Example:
        >>> from accel_callbacks.offload.attachment import stored_by_name
        >>> stored_by_name({}).tensors
        {}
    """
    return StoredWeights(
        {name: one.tensor for name, one in found.items()},
        {one.tensor.path: one.identity for one in found.values()},
    )
