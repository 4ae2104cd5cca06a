"""Operations on tensors in nested structures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from accel_callbacks.collectives.nested import (
    find_batch_size,
    find_device,
    is_container,
    is_named_tuple,
    is_tensor,
    is_value,
    leaves,
    map_leaves,
    map_tensors,
    map_values,
    values_in,
)
from accel_callbacks.collectives.objects import barrier

__all__ = [
    "TensorInformation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_input_tensors",
    "recursively_apply",
    "slice_tensors",
    "wait_for_everyone",
]

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInformation:
    """Shape and dtype of a tensor, without its values.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the tensor.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import TensorInformation
        >>> TensorInformation(torch.Size([2]), torch.float32).shape
        torch.Size([2])
    """

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether an object is a :class:`TensorInformation`.

    Example:
        >>> from accel_callbacks.utils import is_tensor_information
        >>> is_tensor_information("float32")
        False
    """
    return isinstance(tensor_info, TensorInformation)


def get_shape(data: Any) -> Any:
    """Replace each tensor by its shape, as a list.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import get_shape
        >>> get_shape([torch.ones(4, 2)])
        [[4, 2]]
    """
    return map_tensors(data, lambda tensor: list(tensor.shape))


def get_data_structure(data: Any) -> Any:
    """Replace each tensor by its :class:`TensorInformation`.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import get_data_structure
        >>> get_data_structure([torch.ones(2)])
        [TensorInformation(shape=torch.Size([2]), dtype=torch.float32)]
    """
    return map_tensors(data, lambda tensor: TensorInformation(tensor.shape, tensor.dtype))


def initialize_tensors(data_structure: Any) -> Any:
    """Replace each :class:`TensorInformation` by an uninitialized tensor.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import get_data_structure, initialize_tensors
        >>> initialize_tensors(get_data_structure([torch.ones(2)]))[0].shape
        torch.Size([2])
    """
    return map_leaves(
        data_structure,
        lambda info: torch.empty(info.shape, dtype=info.dtype),
        is_tensor_information,
    )


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether an object is a tensor.

    Example:
        >>> from accel_callbacks.utils import is_torch_tensor
        >>> is_torch_tensor([1.0])
        False
    """
    return is_tensor(tensor)


def is_namedtuple(data: Any) -> bool:
    """Return whether an object is an instance of a named tuple.

    Example:
        >>> from typing import NamedTuple
        >>> from accel_callbacks.utils import is_namedtuple
        >>> Pair = NamedTuple("Pair", [("left", int), ("right", int)])
        >>> is_namedtuple(Pair(1, 2)), is_namedtuple((1, 2))
        (True, False)
    """
    return is_named_tuple(data)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Collect items in a list, tuple or named tuple of the class of ``obj``.

    Example:
        >>> from accel_callbacks.utils import honor_type
        >>> honor_type((0, 0), [1, 2])
        (1, 2)
    """
    return obj._make(generator) if is_named_tuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to the tensors of a nested structure, and keep the structure.

    Args:
        func: called with a tensor, ``*args`` and ``**kwargs``.
        data: lists, tuples, named tuples, mappings and dataclasses, in any nesting.
        *args: passed to ``func``.
        test_type: selects the objects to apply it to, by default tensors.
        error_on_other_type: raise TypeError for objects that are neither containers nor pass
            ``test_type``, rather than keep them.
        **kwargs: passed to ``func``.

    Raises:
        TypeError: an object has another type, with ``error_on_other_type``.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import recursively_apply
        >>> recursively_apply(torch.add, {"x": torch.ones(1), "name": "a"}, 2)
        {'x': tensor([3.]), 'name': 'a'}
    """
    if error_on_other_type:
        for path, value in leaves(data, lambda leaf: test_type(leaf) or not is_container(leaf)):
            if not test_type(value):
                raise TypeError(f"{path or 'data'} is a {type(value).__name__}, which is refused.")
    return map_leaves(data, lambda leaf: func(leaf, *args, **kwargs), test_type)


def listify(data: Any) -> Any:
    """Replace each tensor by a number or a list of numbers.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import listify
        >>> listify({"x": torch.ones(2, dtype=torch.bfloat16)})
        {'x': [1.0, 1.0]}
    """
    return map_tensors(data, lambda tensor: tensor.detach().tolist())


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """Slice each tensor of a nested structure along dimension 0.

    Args:
        data: the structure.
        tensor_slice: the rows.
        process_index: unused; for functions that replace this one.
        num_processes: unused too.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import slice_tensors
        >>> slice_tensors([torch.arange(4)], slice(1, 3))
        [tensor([1, 2])]
    """
    return map_tensors(data, lambda tensor: tensor[tensor_slice])


def concatenate(data: Sequence[T], dim: int = 0) -> T:
    """Concatenate the tensors at the same positions of equal structures.

    Args:
        data: one or more structures of tensors and numpy arrays; other objects must be equal.
        dim: the dimension to concatenate along.

    Raises:
        ValueError: ``data`` is empty, or the structures differ.
        TypeError: objects that cannot be concatenated differ.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import concatenate
        >>> concatenate([{"x": torch.ones(1)}, {"x": torch.zeros(1)}])
        {'x': tensor([1., 0.])}
    """
    if not data:
        raise ValueError("there is nothing to concatenate: pass at least one structure.")
    structures = [leaves(structure, is_value, by_key=True) for structure in data]
    places = [[leaf.path for leaf in structure] for structure in structures]
    for index, place in enumerate(places):
        if place != places[0]:
            raise ValueError(
                f"the structures differ: the first has tensors at {places[0]}, number {index} at "
                f"{place}."
            )
    others = [leaves(structure, _is_kept, by_key=True) for structure in data]
    for index, kept in enumerate(others):
        if kept != others[0]:
            raise TypeError(
                f"only tensors and numpy arrays can be concatenated: the first structure has also "
                f"{dict(others[0])}, number {index} {dict(kept)}."
            )
    each = iter(zip(*map(values_in, data), strict=True))
    return map_values(data[0], lambda _: torch.cat(next(each), dim))


def _is_kept(leaf: Any) -> bool:
    return not is_container(leaf) and not is_value(leaf)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert the float16 and bfloat16 tensors of a nested structure to float32.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import convert_to_fp32
        >>> convert_to_fp32([torch.ones(1, dtype=torch.bfloat16)])
        [tensor([1.])]
    """
    low = (torch.float16, torch.bfloat16)
    return map_tensors(tensor, lambda leaf: leaf.float() if leaf.dtype in low else leaf)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to apply :func:`convert_to_fp32` to its result.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import convert_outputs_to_fp32
        >>> convert_outputs_to_fp32(torch.nn.Linear(1, 1).bfloat16())(
        ...     torch.ones(1).bfloat16()
        ... ).dtype
        torch.float32
    """

    @functools.wraps(model_forward, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad batches with zeros to the next multiple of ``num_processes``.

    Args:
        tensor: a nested structure; tensors whose size along ``dim`` is not ``batch_size`` are kept.
        batch_size: number of samples in the batch.
        num_processes: number of equal parts to split it into.
        dim: the dimension of the samples.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import pad_input_tensors
        >>> pad_input_tensors(torch.ones(3), batch_size=3, num_processes=2)
        tensor([1., 1., 1., 0.])
    """
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        has = -leaf.dim() <= dim < leaf.dim()
        if not missing or not has or leaf.shape[dim] != batch_size:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return map_tensors(tensor, pad)


def wait_for_everyone() -> None:
    """Block until all processes have called this.

    Example:
        >>> from accel_callbacks import wait_for_everyone
        >>> wait_for_everyone()
    """
    barrier()
