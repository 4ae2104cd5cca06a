"""Estimate the memory of a model's weights, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from accel_callbacks.errors import nearest
from accel_callbacks.models.offload.weights import parts

__all__ = ["ESTIMATED_DTYPES", "MemoryEstimate", "ModelSizes", "TrainingMemory", "model_sizes"]

ESTIMATED_DTYPES = ("fp32", "fp16", "bf16", "int8", "int4")

_QUANTISED_BITS = {"int8": 8, "int4": 4}
_BLOCK = 64  # weights that share one scale in int4
_SCALE = 4  # bytes of a scale, and of Adam's step counter
_LINEAR = ("Linear", "NonDynamicallyQuantizableLinear", "Conv1D")


@dataclass(frozen=True)
class TrainingMemory:
    """The memory that training with Adam always holds, in bytes.

    Args:
        weights: parameters and buffers; in mixed precision the fp32 ones that Adam updates.
        copies: in mixed precision, the low-precision copies that autocast computes with.
        gradients: one for each trainable parameter.
        optimizer: Adam's two averages, and its step counters.
    """

    weights: int
    copies: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.copies + self.gradients + self.optimizer


@dataclass(frozen=True)
class MemoryEstimate:
    """The sizes of a model in one dtype, in bytes.

    Args:
        dtype: one of :data:`ESTIMATED_DTYPES`.
        weights: parameters and buffers, as inference holds them.
        largest_layer: size of the largest part that must be on one device.
        layer_name: name of that part.
        training: None for a dtype that is not trained in.
    """

    dtype: str
    weights: int
    largest_layer: int
    layer_name: str
    training: TrainingMemory | None


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model.

    Args:
        parameters: elements of all parameters; tied ones count once.
        trainable: elements of the parameters that require gradients.
        buffers: elements of all buffers.
        estimates: by dtype.
    """

    parameters: int
    trainable: int
    buffers: int
    estimates: Mapping[str, MemoryEstimate]


def model_sizes(model: torch.nn.Module, dtypes: Iterable[str] = ESTIMATED_DTYPES) -> ModelSizes:
    """Return the sizes of a model by dtype; activations are not counted.

    fp32, fp16, bf16: every floating-point parameter and buffer has that type. int8, int4: the
    weights of linear layers, but for the output layer, are stored in that many bits with their
    scales (of 32 bits: one a row for int8, one for 64 weights for int4); the rest has 16 bits.

    Args:
        model: also one on the meta device, which takes no memory.
        dtypes: which ones.

    Raises:
        ValueError: a dtype that is not among :data:`ESTIMATED_DTYPES`.
    """
    chosen = list(dtypes)
    for name in chosen:
        if name not in ESTIMATED_DTYPES:
            raise ValueError(
                f"{name!r} is not one of {', '.join(ESTIMATED_DTYPES)}."
                + nearest(name, ESTIMATED_DTYPES)
            )
    parameters, buffers = list(model.parameters()), list(model.buffers())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    measure = _Measure(model)
    return ModelSizes(
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in trained),
        sum(buffer.numel() for buffer in buffers),
        {name: measure.in_dtype(name) for name in chosen},
    )


class _Measure:
    """Sizes of one model's tensors in any dtype."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors: Sequence[torch.Tensor] = [*model.parameters(), *model.buffers()]
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._layers = _layers(model)
        self._quantised = _quantised(model)
        self._cast = _cast(model)

    def in_dtype(self, dtype: str) -> MemoryEstimate:
        """Return the sizes in one dtype."""
        layers = {name: self._bytes(tensors, dtype) for name, tensors in self._layers.items()}
        largest = max(layers, key=lambda name: layers[name], default="")
        return MemoryEstimate(
            dtype,
            self._bytes(self._tensors, dtype),
            layers.get(largest, 0),
            largest,
            None if dtype in _QUANTISED_BITS else self._training(dtype),
        )

    def _bytes(self, tensors: Iterable[torch.Tensor], dtype: str) -> int:
        return sum(self._one(tensor, dtype) for tensor in tensors)

    def _one(self, tensor: torch.Tensor, dtype: str) -> int:
        """Return the bytes of a tensor; integers are not converted with a model."""
        count = tensor.numel()
        if not tensor.is_floating_point():
            return count * tensor.element_size()
        if dtype in _QUANTISED_BITS and id(tensor) in self._quantised:
            bits = _QUANTISED_BITS[dtype]
            scales = self._quantised[id(tensor)] if bits == 8 else -(-count // _BLOCK)
            return -(-count * bits // 8) + scales * _SCALE
        return count * (4 if dtype == "fp32" else 2)

    def _training(self, dtype: str) -> TrainingMemory:
        """Return the memory of training with Adam; 16 bits are mixed precision over fp32."""
        full = self._bytes(self._trained, "fp32")
        cast = [parameter for parameter in self._trained if id(parameter) in self._cast]
        return TrainingMemory(
            weights=self._bytes(self._tensors, "fp32"),
            copies=0 if dtype == "fp32" else self._bytes(cast, dtype),
            gradients=full,
            optimizer=2 * full + _SCALE * len(self._trained),
        )


def _layers(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of the parts of a model that are not split."""
    layers: dict[str, list[torch.Tensor]] = {}
    for part in parts(model):
        if part.tensors or not part.is_split:
            layers.setdefault(part.name or type(model).__name__, []).extend(part.tensors)
    return layers


def _quantised(model: torch.nn.Module) -> dict[int, int]:
    """Return the weights that are quantized, by id, with their number of rows."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    embedded = {id(p) for m in model.modules() if _is_embedding(m) for p in m.parameters()}
    return {
        id(module.weight): module.weight.shape[0]
        for module in model.modules()
        if type(module).__name__ in _LINEAR
        and isinstance(module.weight, torch.Tensor)
        and module is not output
        and id(module.weight) not in embedded
    }


def _cast(model: torch.nn.Module) -> set[int]:
    """Return the parameters that autocast copies to 16 bits: all but norms and embeddings."""
    return {
        id(parameter)
        for module in model.modules()
        if not _is_embedding(module) and "Norm" not in type(module).__name__
        for parameter in module.parameters(recurse=False)
    }


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
