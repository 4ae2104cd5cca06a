"""Facts about nested structures of tensors: sizes, devices, shapes and types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accel_callbacks.collectives.nested import is_tensor, leaves, map_leaves, map_tensors

__all__ = [
    "TensorInformation",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "get_shape",
    "initialize_tensors",
    "is_tensor_information",
]


@dataclass(frozen=True)
class TensorInformation:
    """Shape and type of a tensor, without its values.

    Args:
        shape: of the tensor.
        dtype: of the tensor.

    Example:
        >>> import torch
        >>> from accel_callbacks.describing import TensorInformation
        >>> TensorInformation(torch.Size([2]), torch.float32).shape
        torch.Size([2])
    """

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """True for a :class:`TensorInformation`.

    Example:
        >>> from accel_callbacks.describing import is_tensor_information
        >>> is_tensor_information("float32")
        False
    """
    return isinstance(tensor_info, TensorInformation)


def find_batch_size(data: Any) -> int | None:
    """The size of the first dimension of the first tensor that has one; None without any.

    Example:
        >>> import torch
        >>> from accel_callbacks.describing import find_batch_size
        >>> find_batch_size({"name": "a", "x": torch.ones(4, 2)})
        4
    """
    found = leaves(data, lambda leaf: is_tensor(leaf) and leaf.dim() > 0)
    return int(found[0].value.shape[0]) if found else None


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor; None without any.

    Example:
        >>> import torch
        >>> from accel_callbacks.describing import find_device
        >>> find_device(["a", torch.ones(1)])
        device(type='cpu')
    """
    found = leaves(data, is_tensor)
    return found[0].value.device if found else None


def get_shape(data: Any) -> Any:
    """The same structure with the shape of each tensor, as a list.

    Example:
        >>> import torch
        >>> from accel_callbacks.describing import get_shape
        >>> get_shape([torch.ones(4, 2)])
        [[4, 2]]
    """
    return map_tensors(data, lambda tensor: list(tensor.shape))


def get_data_structure(data: Any) -> Any:
    """The same structure with a :class:`TensorInformation` in place of each tensor.

    Example:
        >>> import torch
        >>> from accel_callbacks.describing import get_data_structure
        >>> get_data_structure([torch.ones(2)])
        [TensorInformation(shape=torch.Size([2]), dtype=torch.float32)]
    """
    return map_tensors(data, lambda tensor: TensorInformation(tensor.shape, tensor.dtype))


def initialize_tensors(data_structure: Any) -> Any:
    """Empty tensors in place of each :class:`TensorInformation`; their values are undefined.

    Example:
        >>> import torch
        >>> from accel_callbacks.describing import get_data_structure, initialize_tensors
        >>> initialize_tensors(get_data_structure([torch.ones(2)]))[0].shape
        torch.Size([2])
    """
    return map_leaves(
        data_structure,
        lambda info: torch.empty(info.shape, dtype=info.dtype),
        is_tensor_information,
    )
