"""Estimate the memory of a rank for a model sharded by FSDP and tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel_callbacks.engines.tensor.plan import cut_dim, matched_parameters, matched_styles

__all__ = ["ShardedMemory", "sharded_memory"]

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_COUNTER = 4  # bytes of Adam's step counter


@dataclass(frozen=True)
class ShardedMemory:
    """The memory that training with Adam always holds on a rank of a mesh, in bytes.

    Args:
        dtype: the type to compute in.
        masters: the type of the weights that Adam updates.
        weights: parts of the parameters, and all buffers.
        gradients: parts of the gradients.
        optimizer: parts of Adam's two averages, and its step counters.
        largest_unit: parameters of the largest unit, which is gathered whole to compute.
        unit_name: name of that unit.
    """

    dtype: str
    masters: str
    weights: int
    gradients: int
    optimizer: int
    largest_unit: int
    unit_name: str

    @property
    def total(self) -> int:
        """Sum of the parts, without gathered units."""
        return self.weights + self.gradients + self.optimizer


def sharded_memory(
    model: torch.nn.Module,
    shards: int,
    units: Iterable[Sequence[torch.nn.Module]],
    dtypes: Iterable[str] = ("fp32", "bf16"),
    *,
    tensor_parallel: int = 1,
    plan: Mapping[str, Any] | None = None,
) -> list[ShardedMemory]:
    """Return the memory of the rank with the largest parts, by dtype; activations do not count.

    Each 16-bit dtype comes twice: with fp32 masters, and with weights and states of 16 bits.
    Frozen parameters keep their own type beside fp32 masters.

    Args:
        model: also one on the meta device, which takes no memory.
        shards: ranks over which FSDP shards.
        units: modules that are gathered together, inner units first; the rest of the model is one.
        dtypes: of ``"fp32"``, ``"fp16"`` and ``"bf16"``.
        tensor_parallel: ranks that share each layer.
        plan: how they do, as :class:`accel_callbacks.TorchTensorParallelConfig` takes it; styles
            by their names only.

    Raises:
        ValueError: the plan does not fit the model, or has a style without a name.
    """
    shapes = _cut_shapes(model, tensor_parallel, plan or {})
    sizes = dict(_unit_elements(model, units, shapes))
    largest = max(sizes, key=lambda name: sizes[name])
    return [
        _memory(model, shards, shapes, dtype, masters, sizes[largest], largest)
        for dtype in dtypes
        for masters in dict.fromkeys(("fp32", dtype))
    ]


_Shapes = Mapping[int, Sequence[int]]


def _cut_shapes(model: torch.nn.Module, ranks: int, plan: Mapping[str, Any]) -> _Shapes:
    """Return the shapes of the first rank's parts of parameters, by id."""
    shapes = {id(parameter): list(parameter.shape) for parameter in model.parameters()}
    if ranks == 1:
        return shapes
    cut: set[int] = set()
    for name, module, style in matched_styles(model, plan):
        if not isinstance(style, str):
            raise ValueError(f"the plan has a {type(style).__name__} for {name}: give its name.")
        for key, parameter in module.named_parameters(recurse=False):
            dimension = _cut_dimension(module, key, style)
            if dimension is not None and id(parameter) not in cut:
                cut.add(id(parameter))
                shape = shapes[id(parameter)]
                shape[dimension] = -(-shape[dimension] // ranks)
    for _, module, key, style in matched_parameters(model, plan):
        parameter = module.get_parameter(key)
        dimension = cut_dim(parameter, style)
        if dimension is not None:
            shapes[id(parameter)][dimension] //= ranks
    return shapes


def _cut_dimension(module: torch.nn.Module, key: str, style: str) -> int | None:
    """Return the dimension along which torch's styles cut a parameter, None if it stays whole."""
    rows = style.startswith(("rowwise", "packed_rowwise", "embedding"))
    if not rows and not style.startswith(("colwise", "packed_colwise")):
        return None
    if isinstance(module, torch.nn.Embedding):
        return 0 if rows else 1
    if key != "weight":
        return None if rows else 0
    return 1 if rows else 0


def _memory(
    model: torch.nn.Module,
    shards: int,
    shapes: _Shapes,
    dtype: str,
    masters: str,
    largest: int,
    name: str,
) -> ShardedMemory:
    parameters, buffers = list(model.parameters()), list(model.buffers())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    elements = {id(p): _shard_elements(shapes[id(p)], shards) for p in parameters}
    states = sum(elements[id(parameter)] for parameter in trained) * _BYTES[masters]
    # Beside fp32 masters, what is frozen keeps the type that it was loaded in.
    frozen = sum(
        elements[id(parameter)]
        * (parameter.element_size() if masters != dtype else _itemsize(parameter, dtype))
        for parameter in parameters
        if not parameter.requires_grad
    )
    return ShardedMemory(
        dtype,
        masters,
        weights=states + frozen + sum(b.numel() * _itemsize(b, masters) for b in buffers),
        gradients=states,
        optimizer=2 * states + _COUNTER * len(trained),
        largest_unit=largest * _BYTES[dtype] if shards > 1 else 0,
        unit_name=name,
    )


def _shard_elements(shape: Sequence[int], shards: int) -> int:
    """Return the elements of the first rank's shard: FSDP2 cuts the first dimension in chunks."""
    if not shape:
        return 1
    return -(-shape[0] // shards) * math.prod(shape[1:])


def _itemsize(tensor: torch.Tensor, dtype: str) -> int:
    return _BYTES[dtype] if tensor.is_floating_point() else tensor.element_size()


def _unit_elements(
    model: torch.nn.Module, units: Iterable[Sequence[torch.nn.Module]], shapes: _Shapes
) -> Iterator[tuple[str, int]]:
    """Yield the name of each unit and its elements; a parameter is in its innermost unit."""
    names = {module: name for name, module in model.named_modules()}
    seen: set[int] = set()
    for unit in [*units, (model,)]:
        unseen = {id(p) for module in unit for p in module.parameters()} - seen
        seen |= unseen
        elements = sum(math.prod(shapes[mark]) for mark in unseen)
        yield ", ".join(names[module] for module in unit) or type(model).__name__, elements
