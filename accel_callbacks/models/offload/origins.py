"""The origins of weights whose values are not in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from accel_callbacks.models.offload.assignment import Weight, WeightPlacement
from accel_callbacks.models.offload.placeholder import AbsentWeight
from accel_callbacks.models.offload.residence import offload_hooks
from accel_callbacks.models.offload.source import Stored, StoredWeights, WeightReadError

__all__ = ["Origin", "Origins", "detach", "note", "note_origin", "same_bits"]

_NOTED = "_stored_weights"
_ORIGIN = "_stored_at"

#: Where the values of a weight that is not in its slot are.
Origin: TypeAlias = "Stored | torch.Tensor"


class Origins:
    """The origins of a model's weights whose values are not in memory.

    Args:
        model: the model.
        weights: where its weights go.
        index: of the caller's, which counts more than values in memory.
        read_index: returns the index that counts for weights without values, None without one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        weights: Sequence[WeightPlacement],
        index: StoredWeights | None,
        read_index: Callable[[], StoredWeights | None],
    ) -> None:
        self._origins = _placeholder_origins(model)
        self._given = index
        self._indexed = index
        lost = [
            assigned.weight
            for assigned in weights
            if self.is_absent(assigned) and id(assigned.weight.tensor) not in self._origins
        ]
        if index is None and lost:
            self._indexed = read_index()
        #: Then it is this model's, and has its buffers, which are built with other values.
        self._serves = self._indexed is not None and any(
            self._in(self._indexed, weight) is not None for weight in lost
        )

    def is_absent(self, assigned: WeightPlacement) -> bool:
        """Return whether a weight has no values in memory."""
        tensor = assigned.weight.tensor
        is_lost = tensor.is_meta and assigned.device.type != "meta"
        return isinstance(tensor, AbsentWeight) or is_lost

    def of(self, assigned: WeightPlacement) -> Origin | None:
        """Return the origin of a weight's values; None if they are in memory, or unknown."""
        weight, is_on_disk = assigned.weight, assigned.place == "disk"
        if (origin := self._origins.get(id(weight.tensor))) is not None:
            return origin
        if self._indexed is None:
            return _origin_note(weight.tensor) if is_on_disk else None
        is_asked = self._given is not None and is_on_disk
        is_buffer = self._serves and not weight.is_parameter and weight.persistent
        if is_asked or is_buffer or self.is_absent(assigned):
            return self._in(self._indexed, weight)
        return None

    @staticmethod
    def _in(index: StoredWeights, weight: Weight) -> Stored | None:
        for name in weight.names:
            if name in index.tensors:
                return index.at(name)
        return None


def _placeholder_origins(model: torch.nn.Module) -> dict[int, Origin]:
    """Return the origins of a dispatched model's placeholders, by their ``id``.

    Modules may have got other names since: the slots count.
    """
    origins: dict[int, Origin] = {}
    for hook in offload_hooks(model):
        for _, unit in hook.units:
            for name, stands in unit.placeholders.items():
                held = hook.offload.held.get(name)
                origins[id(stands)] = hook.offload.stored.at(name) if held is None else held
    noted: StoredWeights | None = vars(model).get(_NOTED)
    if noted is not None:
        for name, parameter in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            if name in noted.tensors:
                origins.setdefault(id(parameter), noted.at(name))
    return origins


def note_origin(tensor: torch.Tensor, stored: StoredWeights, name: str) -> None:
    """Record on a tensor the file that its values were read from, to avoid writing them again."""
    vars(tensor)[_ORIGIN] = stored.at(name)


def _origin_note(tensor: torch.Tensor) -> Stored | None:
    """Return the place of a tensor's values in a file; None if they have changed since."""
    stored: Stored | None = vars(tensor).get(_ORIGIN)
    if stored is None:
        return None
    try:
        value = stored.mapped().to(tensor.dtype)
    except WeightReadError:
        return None
    return stored if same_bits(tensor, value) else None


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype have the same bits.

    Example:
        >>> import torch
        >>> from accel_callbacks.models.offload.origins import same_bits
        >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
    """
    from checkpoint_io.format.safetensors import as_bytes

    values = [as_bytes(side.detach().to("cpu").contiguous()) for side in (tensor, other)]
    return torch.equal(*values)


def note(model: torch.nn.Module, stored: StoredWeights) -> None:
    """Record on a model the origins of its placeholders, until it is dispatched."""
    vars(model)[_NOTED] = stored


def detach(model: torch.nn.Module) -> None:
    """Remove the hooks that fetch weights, and leave the placeholders."""
    vars(model).pop(_NOTED, None)
    for hook in list(offload_hooks(model)):
        hook.detach()
    for module in model.modules():
        if (guard := vars(module).get("_offload_guard")) is not None:
            guard.off()
