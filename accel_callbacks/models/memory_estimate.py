"""Estimate the memory of a model's weights, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from accel_callbacks.models.offload.weights import parts

__all__ = ["ESTIMATED_DTYPES", "MemoryEstimate", "estimate_memory"]

ESTIMATED_DTYPES = ("fp32", "fp16", "bf16", "int8", "int4")

_QUANTIZED_BITS = {"int8": 8, "int4": 4}
_BLOCK = 64  # weights that share one scale in int4
_SCALE = 4  # bytes of a scale, and of Adam's step counter
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
    weights of linear layers, but for the output layer, are stored in that many bits with their
    scales (of 32 bits: one a row for int8, one for 64 weights for int4); the rest has 16 bits.

    Args:
        model: also one on the meta device, which takes no memory.
        dtypes: of :data:`ESTIMATED_DTYPES`.
    """
    tensors = [*model.parameters(), *model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    layers = {part.name: part.tensors for part in parts(model)}
    rows = _rows_of_quantized(model)

    def nbytes(tensors: Iterable[torch.Tensor], dtype: str) -> int:
        return sum(_nbytes(tensor, dtype, rows.get(id(tensor))) for tensor in tensors)

    masters = nbytes(trained, "fp32")
    # Gradients and two averages of each trained weight, and Adam's step counters.
    states = nbytes(tensors, "fp32") + 3 * masters + _SCALE * len(trained)
    copied = _autocast_copies(model)
    copies = [parameter for parameter in trained if id(parameter) in copied]
    estimates = []
    for dtype in dtypes:
        sizes = {name: nbytes(inside, dtype) for name, inside in layers.items()}
        largest = max(sizes, key=lambda name: sizes[name], default="")
        training = None
        if dtype not in _QUANTIZED_BITS:
            training = states + (0 if dtype == "fp32" else nbytes(copies, dtype))
        estimates.append(
            MemoryEstimate(dtype, nbytes(tensors, dtype), sizes.get(largest, 0), largest, training)
        )
    return estimates


def _nbytes(tensor: torch.Tensor, dtype: str, rows: int | None) -> int:
    """Return the bytes of a tensor; integers are not converted with a model.

    Args:
        tensor: a parameter or buffer.
        dtype: of :data:`ESTIMATED_DTYPES`.
        rows: of a weight that is quantized.
    """
    count = tensor.numel()
    if not tensor.is_floating_point():
        return count * tensor.element_size()
    if rows is not None and dtype in _QUANTIZED_BITS:
        bits = _QUANTIZED_BITS[dtype]
        scales = rows if bits == 8 else -(-count // _BLOCK)
        return -(-count * bits // 8) + scales * _SCALE
    return count * (4 if dtype == "fp32" else 2)


def _rows_of_quantized(model: torch.nn.Module) -> dict[int, int]:
    """Return the number of rows of the weights that are quantized, by their ids."""
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
