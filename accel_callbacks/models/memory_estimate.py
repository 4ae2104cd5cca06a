"""Estimate the memory of weights, gradients and optimizer states, of a whole model or of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from accel_callbacks.models.offload.weights import parts

__all__ = [
    "ESTIMATED_DTYPES",
    "MemoryEstimate",
    "ShardedMemory",
    "estimate_memory",
    "sharded_memory",
]

ESTIMATED_DTYPES = ("fp32", "fp16", "bf16", "int8", "int4")

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_QUANTIZED_BYTES = {"int8": 1, "int4": 9 / 16}  # int4 has a scale of 32 bits for 64 weights
_COUNTER = 4  # bytes of Adam's step counter
_LINEAR = ("Linear", "NonDynamicallyQuantizableLinear", "Conv1D")


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a model in one dtype, in bytes.

    Args:
        dtype: one of :data:`ESTIMATED_DTYPES`.
        inference: parameters and buffers.
        largest_layer: size of the largest part that must be on one device.
        layer_name: name of that part.
        training: what training with Adam always holds; None for a dtype that is not trained in.
    """

    dtype: str
    inference: int
    largest_layer: int
    layer_name: str
    training: int | None


def estimate_memory(model: torch.nn.Module, dtypes: Iterable[str]) -> list[MemoryEstimate]:
    """Return the memory of a model by dtype; activations are not counted.

    fp32, fp16, bf16: every floating-point parameter and buffer has that type. int8, int4: the
    weights of linear layers, but for the output layer, are stored in that many bits (int4 with a
    scale of 32 bits for 64 weights); the rest has 16 bits.

    Args:
        model: also one on the meta device, which takes no memory.
        dtypes: of :data:`ESTIMATED_DTYPES`.
    """
    tensors = [*model.parameters(), *model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    layers = {part.name: part.tensors for part in parts(model)}
    quantized = _quantized_weights(model)

    def nbytes(tensors: Iterable[torch.Tensor], dtype: str) -> int:
        size = _QUANTIZED_BYTES.get(dtype, 2)
        return sum(
            math.ceil(tensor.numel() * size)
            if dtype in _QUANTIZED_BYTES and id(tensor) in quantized
            else tensor.numel() * _itemsize(tensor, dtype)
            for tensor in tensors
        )

    # Gradients and two averages of each trained weight, and Adam's step counters.
    states = nbytes(tensors, "fp32") + 3 * nbytes(trained, "fp32") + _COUNTER * len(trained)
    copied = _autocast_copies(model)
    copies = [parameter for parameter in trained if id(parameter) in copied]
    estimates = []
    for dtype in dtypes:
        sizes = {name: nbytes(inside, dtype) for name, inside in layers.items()}
        largest = max(sizes, key=lambda name: sizes[name], default="")
        training = None
        if dtype in _BYTES:
            training = states + (0 if dtype == "fp32" else nbytes(copies, dtype))
        estimates.append(
            MemoryEstimate(dtype, nbytes(tensors, dtype), sizes.get(largest, 0), largest, training)
        )
    return estimates


def _itemsize(tensor: torch.Tensor, dtype: str) -> int:
    """Return the bytes of an element; integers are not converted with a model."""
    return _BYTES.get(dtype, 2) if tensor.is_floating_point() else tensor.element_size()


def _quantized_weights(model: torch.nn.Module) -> set[int]:
    """Return the ids of the weights that int8 and int4 quantize."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    embedded = {id(p) for m in model.modules() if _is_embedding(m) for p in m.parameters()}
    weights = {
        id(module.weight)
        for module in model.modules()
        if type(module).__name__ in _LINEAR and module is not output
    }
    return weights - embedded


def _autocast_copies(model: torch.nn.Module) -> set[int]:
    """Return the ids of parameters that autocast copies to 16 bits: no norms, no embeddings."""
    return {
        id(parameter)
        for module in model.modules()
        if not _is_embedding(module) and "Norm" not in type(module).__name__
        for parameter in module.parameters(recurse=False)
    }


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))


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
) -> list[ShardedMemory]:
    """Return the memory of the rank with the largest parts, by dtype; activations do not count.

    Each 16-bit dtype comes twice: with fp32 masters, and with weights and states of 16 bits.
    Frozen parameters keep their own type beside fp32 masters.

    Args:
        model: also one on the meta device, which takes no memory.
        shards: ranks over which FSDP shards.
        units: modules that are gathered together, inner units first; the rest of the model is one.
        dtypes: of ``"fp32"``, ``"fp16"`` and ``"bf16"``.
    """
    sizes = dict(_unit_elements(model, units))
    largest = max(sizes, key=lambda name: sizes[name])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    estimates = []
    for dtype in dtypes:
        for masters in dict.fromkeys(("fp32", dtype)):
            states = sum(_shard_elements(p, shards) for p in trained) * _BYTES[masters]
            weights = states + sum(b.numel() * _itemsize(b, masters) for b in model.buffers())
            for parameter in frozen:
                # Beside fp32 masters, what is frozen keeps the type that it was loaded in.
                own = masters != dtype
                size = parameter.element_size() if own else _itemsize(parameter, dtype)
                weights += _shard_elements(parameter, shards) * size
            estimates.append(
                ShardedMemory(
                    dtype,
                    masters,
                    weights=weights,
                    gradients=states,
                    optimizer=2 * states + _COUNTER * len(trained),
                    largest_unit=sizes[largest] * _BYTES[dtype] if shards > 1 else 0,
                    unit_name=largest,
                )
            )
    return estimates


def _shard_elements(parameter: torch.Tensor, shards: int) -> int:
    """Return the elements of the first rank's shard: FSDP2 cuts the first dimension in chunks."""
    if not parameter.dim():
        return 1
    return -(-parameter.shape[0] // shards) * math.prod(parameter.shape[1:])


def _unit_elements(
    model: torch.nn.Module, units: Iterable[Sequence[torch.nn.Module]]
) -> Iterator[tuple[str, int]]:
    """Yield the name of each unit and its elements; a parameter is in its innermost unit."""
    names = {module: name for name, module in model.named_modules()}
    seen: set[torch.nn.Parameter] = set()
    for unit in [*units, (model,)]:
        unseen = {p for module in unit for p in module.parameters()} - seen
        seen |= unseen
        elements = sum(parameter.numel() for parameter in unseen)
        yield ", ".join(names[module] for module in unit) or type(model).__name__, elements
