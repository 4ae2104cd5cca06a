"""Estimate the memory that a rank needs for a model that FSDP shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["ShardedMemory", "sharded_memory"]

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_COUNTER = 4  # bytes of Adam's step counter


@dataclass(frozen=True)
class ShardedMemory:
    """The memory that training with Adam under FSDP always holds on a rank, in bytes.

    Args:
        dtype: the type to compute in.
        masters: the type of the weights that Adam updates.
        weights: shards of the parameters, and all buffers.
        gradients: shards of the gradients.
        optimizer: shards of Adam's two averages, and its step counters.
        largest_unit: parameters of the largest unit, which is gathered whole to compute.
        unit_name: name of that unit.

    Example:
        >>> from accel_callbacks.modeling.sharded_memory import ShardedMemory
        >>> ShardedMemory("fp32", "fp32", 4, 4, 8, 16, "layers.0").total
        16
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
        """Sum of the shards, without gathered units."""
        return self.weights + self.gradients + self.optimizer


def sharded_memory(
    model: torch.nn.Module,
    shards: int,
    units: Iterable[Sequence[torch.nn.Module]],
    dtypes: Iterable[str] = ("fp32", "bf16"),
) -> list[ShardedMemory]:
    """Return the memory of the rank with the largest shards, by dtype; activations do not count.

    Each 16-bit dtype comes twice: with fp32 masters, and with weights and states of 16 bits.
    Frozen parameters keep their own type beside fp32 masters.

    Args:
        model: also one on the meta device, which takes no memory.
        shards: ranks that share a replica.
        units: modules that are gathered together, inner units first; the rest of the model is one.
        dtypes: of ``"fp32"``, ``"fp16"`` and ``"bf16"``.

    Example:
        >>> import torch
        >>> from accel_callbacks.modeling.sharded_memory import sharded_memory
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(1000, 1000, bias=False)
        >>> one = sharded_memory(model, 8, [], ["fp32"])[0]
        >>> one.weights, one.optimizer, one.largest_unit
        (500000, 1000004, 4000000)
    """
    kinds = [(name, masters) for name in dtypes for masters in dict.fromkeys(("fp32", name))]
    sizes = dict(_units(model, units))
    name = max(sizes, key=lambda one: sizes[one])
    return [_memory(model, shards, *kind, sizes[name], name) for kind in kinds]


def _memory(
    model: torch.nn.Module, shards: int, dtype: str, masters: str, largest: int, name: str
) -> ShardedMemory:
    trained = [one for one in model.parameters() if one.requires_grad]
    frozen = [one for one in model.parameters() if not one.requires_grad]
    states = sum(shard_elements(one, shards) for one in trained) * _BYTES[masters]
    kept = sum(
        shard_elements(one, shards)
        * (one.element_size() if masters != dtype else _size(one, dtype))
        for one in frozen
    )
    buffers = sum(one.numel() * _size(one, masters) for one in model.buffers())
    return ShardedMemory(
        dtype,
        masters,
        weights=states + kept + buffers,
        gradients=states,
        optimizer=2 * states + _COUNTER * len(trained),
        largest_unit=largest * _BYTES[dtype] if shards > 1 else 0,
        unit_name=name,
    )


def shard_elements(parameter: torch.Tensor, shards: int) -> int:
    """Return the elements of the first rank's shard: FSDP2 cuts the first dimension in chunks.

    Example:
        >>> import torch
        >>> from accel_callbacks.modeling.sharded_memory import shard_elements
        >>> shard_elements(torch.empty(7, 3), 2)
        12
    """
    if parameter.dim() == 0 or parameter.numel() == 0:
        return parameter.numel()
    rows = parameter.shape[0]
    return -(-rows // shards) * (parameter.numel() // rows)


def _size(tensor: torch.Tensor, dtype: str) -> int:
    return _BYTES[dtype] if tensor.is_floating_point() else tensor.element_size()


def _units(
    model: torch.nn.Module, units: Iterable[Sequence[torch.nn.Module]]
) -> Iterator[tuple[str, int]]:
    """Yield the name of each unit and its elements; a parameter is in its innermost unit."""
    names = {module: name for name, module in model.named_modules()}
    seen: set[int] = set()
    for unit in units:
        yield ", ".join(names[one] for one in unit), sum(_elements(one, seen) for one in unit)
    yield type(model).__name__, _elements(model, seen)


def _elements(module: torch.nn.Module, seen: set[int]) -> int:
    own = [one for one in module.parameters() if id(one) not in seen]
    seen.update(map(id, own))
    return sum(one.numel() for one in own)
