"""Split a model into the units that are placed: blocks, layers outside of them, tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from accel_callbacks.models.compile import original, regions
from accel_callbacks.models.offload.sizes import (
    AnyDtype,
    as_dtype,
    class_names,
    converted_bytes,
    stored_bytes,
)

__all__ = ["Part", "Unit", "Weights", "parts"]

T = TypeVar("T")


class Part(NamedTuple):
    """A part of a model that is not split further: a module, or a tensor of a module that is.

    Args:
        name: of the module or tensor.
        parameters: by the name within the module; that of a single tensor is ``""``.
        buffers: the same.
        is_block: the module has children, and is not split.
    """

    name: str
    parameters: Mapping[str, torch.nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    is_block: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers."""
        return [*self.parameters.values(), *self.buffers.values()]

    def name_of(self, key: str) -> str:
        """Return the name in the model of one of the tensors."""
        return f"{self.name}.{key}" if key else self.name


def parts(
    model: torch.nn.Module,
    no_split: Collection[str] | str | None = None,
    whole: Collection[torch.nn.Module] = (),
) -> Iterator[Part]:
    """Yield the parts of a model that are not split, in order; a shared module once for each name.

    Args:
        model: the model, which is split itself.
        no_split: names of the classes that are not split; by default those that the model and its
            modules list in ``_no_split_modules``, as models of transformers do.
        whole: modules that are not split either.
    """
    whole_ids = {id(module) for module in whole}

    def visit(module: torch.nn.Module, name: str, classes: frozenset[str]) -> Iterator[Part]:
        if no_split is None:
            classes |= class_names(getattr(module, "_no_split_modules", None))
        children = _present(module._modules)
        is_whole = type(module).__name__ in classes or id(module) in whole_ids
        if name and (not children or is_whole):
            inside = dict(module.named_parameters()), dict(module.named_buffers())
            yield Part(name, *inside, is_block=bool(children))
            return
        prefix = f"{name}." if name else ""
        for key, parameter in _present(module._parameters).items():
            yield Part(prefix + key, {"": parameter}, {})
        for key, child in children.items():
            yield from visit(child, prefix + key, classes)
        for key, buffer in _present(module._buffers).items():
            yield Part(prefix + key, {}, {"": buffer})

    yield from visit(model, "", class_names(no_split))


def _present(slots: Mapping[str, T | None]) -> dict[str, T]:
    """Return the slots of a module that are not None."""
    return {key: entry for key, entry in slots.items() if entry is not None}


@dataclass(frozen=True)
class Unit:
    """Weights that are placed on one device, and fetched at once where they are offloaded.

    Args:
        name: of a module or, outside of the modules that are whole, of a tensor.
        parameters: bytes of its parameters, but for those that an earlier unit counts.
        buffers: bytes of its buffers.
        shared: bytes of its parameters that are tied to those of an earlier unit.
        ties: for each parameter that other units have too, one name: the first that it has.

    Example:
        >>> from accel_callbacks.offload import Unit
        >>> Unit("blocks.0", parameters=100, buffers=4).nbytes
        104
    """

    name: str
    parameters: int
    buffers: int = 0
    shared: int = 0
    ties: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and buffers that no earlier unit counts."""
        return self.parameters + self.buffers


@dataclass(frozen=True)
class Weights:
    """The units of a model in their order, with sizes; no tensors.

    Args:
        units: in the order in which the model has them.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload import Weights
        >>> weights = Weights.of_model(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()))
        >>> [(unit.name, unit.nbytes) for unit in weights.units]
        [('0', 32), ('1', 0)]
    """

    units: tuple[Unit, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers, tied parameters once."""
        return sum(unit.nbytes for unit in self.units)

    @classmethod
    def of_model(
        cls,
        model: torch.nn.Module,
        no_split: Collection[str] | str | None = None,
        dtype: AnyDtype | None = None,
        special_dtypes: Mapping[str, AnyDtype] | None = None,
    ) -> Weights:
        """Return the units of a model.

        A block is one unit, and so is each layer outside of blocks, and each tensor that a module
        has besides its children. A buffer that several units have is counted in each.

        Args:
            model: also one on the meta device.
            no_split: names of the classes of blocks; by default those that the model lists in
                ``_no_split_modules``, else the blocks that it repeats.
            dtype: the dtype that floating-point tensors are loaded as; their own by default.
            special_dtypes: dtypes of single tensors, by name.

        Example:
            >>> import torch
            >>> from accel_callbacks.offload import Weights
            >>> Weights.of_model(torch.nn.Linear(3, 2), dtype="bfloat16").nbytes
            16
        """
        model = original(model)
        pieces = list(parts(model, no_split))
        if no_split is None and not any(part.is_block for part in pieces):
            pieces = list(parts(model, None, list(regions(model))))
        return cls(tuple(_units(pieces, as_dtype(dtype), special_dtypes or {})))

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, int]) -> Weights:
        """Return the units of tensors: each module that has some, in the order of their names.

        Args:
            sizes: bytes of each tensor by its full name, in the order of the model.

        Example:
            >>> from accel_callbacks.offload import Weights
            >>> sizes = {"wte.w": 9, "h.0.w": 2, "h.0.b": 1, "h.1.w": 2}
            >>> [(unit.name, unit.nbytes) for unit in Weights.of_sizes(sizes).units]
            [('wte', 9), ('h.0', 3), ('h.1', 2)]
        """
        modules: dict[str, int] = {}
        for name, nbytes in sizes.items():
            module = name.rpartition(".")[0] or name
            modules[module] = modules.get(module, 0) + nbytes
        return cls(tuple(Unit(name, nbytes) for name, nbytes in modules.items()))


def _units(
    pieces: Sequence[Part], dtype: Any, special_dtypes: Mapping[str, AnyDtype]
) -> Iterator[Unit]:
    """Yield units with their bytes after loading."""
    special = {name: as_dtype(dtype) for name, dtype in special_dtypes.items()}
    first: dict[int, str] = {}  # the first name of a parameter, by identity
    holders: dict[int, set[str]] = {}
    for part in pieces:
        for key, parameter in part.parameters.items():
            first.setdefault(id(parameter), part.name_of(key))
            holders.setdefault(id(parameter), set()).add(part.name)

    def size(name: str, tensor: torch.Tensor) -> int:
        if name not in special:
            return stored_bytes(tensor.numel(), tensor.dtype, dtype)
        return converted_bytes(tensor.numel(), special[name])

    counted: set[int] = set()
    for part in pieces:
        unshared = shared = 0
        for parameter in part.parameters.values():
            nbytes = size(first[id(parameter)], parameter)
            if id(parameter) in counted:
                shared += nbytes
            else:
                unshared += nbytes
                counted.add(id(parameter))
        buffers = sum(size(part.name_of(key), buffer) for key, buffer in part.buffers.items())
        ties = [first[id(p)] for p in part.parameters.values() if len(holders[id(p)]) > 1]
        yield Unit(part.name, unshared, buffers, shared, tuple(ties))
