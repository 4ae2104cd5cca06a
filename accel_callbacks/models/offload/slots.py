"""Slots of tensors in modules, and tensors that are lent to them during a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

__all__ = ["Lent", "Loan", "Slot"]


class Slot(NamedTuple):
    """The place of a tensor in a module.

    Args:
        module: the module.
        key: in its ``_parameters`` or ``_buffers``.
        is_parameter: which of the two.
    """

    module: torch.nn.Module
    key: str
    is_parameter: bool

    @classmethod
    def of(cls, module: torch.nn.Module, tensor_name: str) -> Slot:
        """Return the slot of a parameter or buffer of a module, by its name with dots.

        Raises:
            ValueError: there is none of this name.
        """
        path, _, key = tensor_name.rpartition(".")
        try:
            owner = module.get_submodule(path) if path else module
        except AttributeError:
            owner = None
        if owner is not None and owner._parameters.get(key) is not None:
            return cls(owner, key, True)
        if owner is not None and owner._buffers.get(key) is not None:
            return cls(owner, key, False)
        raise ValueError(
            f"{type(module).__name__} has no parameter or buffer named {tensor_name!r}."
        )

    def get(self) -> torch.Tensor | None:
        """Return the tensor in the slot, None if it is empty."""
        slots = self.module._parameters if self.is_parameter else self.module._buffers
        return slots.get(self.key)

    def put(self, tensor: torch.Tensor) -> None:
        """Put a tensor into the slot, a placeholder or a weight."""
        # Not by setattr, which costs ten times as much and refuses what is no Parameter.
        slots = self.module._parameters if self.is_parameter else self.module._buffers
        slots[self.key] = tensor  # type: ignore[assignment]

    def replace(self, tensor: torch.Tensor | None, other: torch.Tensor) -> None:
        """Put another tensor into the slot if it holds this one."""
        slots = self.module._parameters if self.is_parameter else self.module._buffers
        if slots.get(self.key) is tensor:
            slots[self.key] = other  # type: ignore[assignment]


class Loan(NamedTuple):
    """A tensor that is lent to slots in place of another, with its state when it was lent.

    Args:
        name: of the tensor.
        slots: the places.
        tensor: what is there for a time.
        instead_of: what was there.
        version: of the tensor; None if it counts none.
        pointer: to its values; None if other ones are no change.
        values: what it is a copy of, where a write counts no version.
    """

    name: str
    slots: Sequence[Slot]
    tensor: torch.Tensor
    instead_of: torch.Tensor
    version: int | None
    pointer: int | None
    values: torch.Tensor | None

    def is_changed(self) -> bool:
        """Return whether it was written in place."""
        if self.values is not None:
            return not torch.equal(self.tensor, self.values)
        if self.version is not None and self.tensor._version != self.version:
            return True
        return self.pointer is not None and self.tensor.data_ptr() != self.pointer


class Lent:
    """Tensors that are lent to slots during a call, in place of their own.

    Calls may be nested: the tensors are put back when the last one ends.

    Args:
        by_pointer: ``tensor.data = ...`` is a change, too.
    """

    def __init__(self, by_pointer: bool = False) -> None:
        self._by_pointer = by_pointer
        self._loans: dict[str, Loan] = {}
        self._calls = 0

    def begin(self) -> bool:
        """Count a call; return whether it is the first."""
        self._calls += 1
        return self._calls == 1

    def end(self, of_all: bool = False) -> bool:
        """Count the end of a call, or of all; return whether it was the last."""
        if not self._calls:
            return False
        self._calls = 0 if of_all else self._calls - 1
        return not self._calls

    def __iter__(self) -> Iterator[Loan]:
        return iter(list(self._loans.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._loans

    def put(
        self, name: str, slots: Sequence[Slot], tensor: torch.Tensor, instead_of: torch.Tensor
    ) -> None:
        """Put a tensor into slots that hold another one; skip slots with a third one.

        Args:
            name: of the tensor.
            slots: the places.
            tensor: what comes there; of a buffer that may be written to, a copy.
            instead_of: what is put back at the end.
        """
        slot, values = slots[0], None
        version = None if tensor.is_inference() else tensor._version
        is_written = not slot.is_parameter and (version is None or slot.module.training)
        if is_written and not tensor.is_meta:
            # Batch norm counts no version of what it writes; tensors of inference_mode have none.
            values, tensor = tensor, tensor.clone()
        pointer = tensor.data_ptr() if self._by_pointer else None
        self._loans[name] = Loan(name, slots, tensor, instead_of, version, pointer, values)
        for slot in slots:
            slot.replace(instead_of, tensor)

    def give(self, name: str) -> None:
        """Leave a tensor in its slots."""
        del self._loans[name]

    def take(self) -> list[Loan]:
        """Restore the original tensors, except in slots that have another tensor now.

        Returns:
            The loans of tensors that were written in place.
        """
        loans = list(self._loans.values())
        self._loans.clear()
        changed = [loan for loan in loans if loan.is_changed()]
        for loan in loans:
            for slot in loan.slots:
                slot.replace(loan.tensor, loan.instead_of)
        return changed
