"""The bytes of tensors, modules and models, under Accelerate's names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, TypeAlias

import torch

__all__ = [
    "CustomDtype",
    "calculate_maximum_sizes",
    "check_tied_parameters_in_config",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_max_layer_size",
    "get_module_leaves",
    "get_non_persistent_buffers",
    "named_module_tensors",
    "stored_bytes",
]

_SIZE = re.compile(r"\s*(?P<number>[0-9.eE+-]+)\s*(?P<unit>[kmgtp]?i?b)\s*", re.ASCII | re.I)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


class CustomDtype(Enum):
    """Dtypes that torch has no name for, to plan with.

    Example:
        >>> from accel_callbacks.utils import CustomDtype, dtype_byte_size
        >>> dtype_byte_size(CustomDtype.INT4)
        0.5
    """

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


AnyDtype: TypeAlias = "torch.dtype | CustomDtype | str"
_BITS = {CustomDtype.FP8: 8, CustomDtype.INT4: 4, CustomDtype.INT2: 2}


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes.

    Args:
        size: bytes, or text such as ``"5GB"`` (decimal) and ``"5GiB"`` (binary), up to PB. A small
            ``b`` after a decimal unit means bits, as in Accelerate.

    Raises:
        ValueError: it is no such size, or negative.

    Example:
        >>> from accel_callbacks.utils import convert_file_size_to_int
        >>> convert_file_size_to_int("1.5KiB"), convert_file_size_to_int("8Mb")
        (1536, 1000000)
    """
    nbytes = size if isinstance(size, int) else _bytes_of(size)
    if nbytes is None or nbytes < 0:
        raise ValueError(
            f"{size!r} is no size in bytes: give a number, or text with a unit, such as '5GB' or "
            "'5.5GiB'."
        )
    return nbytes


def _bytes_of(text: str) -> int | None:
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    prefix, binary = match["unit"][0].lower(), match["unit"][1:2].lower() == "i"
    try:
        # Not a float: 2.3 GB are 2,300,000,000 bytes, and float arithmetic has one less.
        value = Decimal(match["number"]) * (1024 if binary else 1000) ** _POWERS.get(prefix, 0)
    except InvalidOperation:
        return None
    in_bits = match["unit"].endswith("b") and not binary
    return int(value) // 8 if in_bits else int(value)


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> int | float:
    """Return the bytes of one element, as torch stores it (a bool is a byte).

    Raises:
        ValueError: it is no dtype.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import dtype_byte_size
        >>> dtype_byte_size(torch.bfloat16)
        2
    """
    if isinstance(dtype, CustomDtype):
        bits = _BITS[dtype]
        return bits // 8 if bits % 8 == 0 else bits / 8
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    raise ValueError(f"{dtype!r} is no dtype, such as torch.bfloat16 or CustomDtype.INT4.")


def stored_bytes(
    count: int, original: torch.dtype, dtype: torch.dtype | CustomDtype | None = None
) -> int:
    """Return the bytes of a tensor once it is loaded as a dtype.

    Integers, bools and complex numbers are not converted when a model is loaded.

    Args:
        count: its elements.
        original: its dtype.
        dtype: the dtype to load floating-point tensors as; its own by default.
    """
    final = original if dtype is None or not original.is_floating_point else dtype
    if isinstance(final, CustomDtype):
        return -(-count * _BITS[final] // 8)
    return count * final.itemsize


def as_dtype(dtype: Any) -> Any:
    """Return the dtype that ``"float16"`` or ``"torch.float16"`` names; others as they are."""
    if not isinstance(dtype, str):
        return dtype
    torch_dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype!r}; give one such as 'bfloat16'.")
    return torch_dtype


def compute_module_sizes(
    model: torch.nn.Module,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of each tensor, module and (as ``""``) the model by name; tied ones once.

    Args:
        model: also one on the meta device.
        dtype: the dtype that floating-point tensors are loaded as; their own by default. Other
            tensors are not converted.
        special_dtypes: dtypes of single tensors, by name.
        buffers_only: count no parameters.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import compute_module_sizes
        >>> dict(compute_module_sizes(torch.nn.Linear(3, 2)))
        {'': 32, 'weight': 24, 'bias': 8}
    """
    final = as_dtype(dtype)
    special = {name: as_dtype(dtype) for name, dtype in (special_dtypes or {}).items()}
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, tensor in tensors:
        if name in special:
            nbytes = converted_bytes(tensor.numel(), special[name])
        else:
            nbytes = stored_bytes(tensor.numel(), tensor.dtype, final)
        sizes[""] += nbytes
        end = name.find(".")
        while end >= 0:
            sizes[name[:end]] += nbytes
            end = name.find(".", end + 1)
        sizes[name] += nbytes
    return sizes


def converted_bytes(count: int, dtype: torch.dtype | CustomDtype) -> int:
    """Return the bytes of a tensor in a dtype that is named for just this tensor."""
    return stored_bytes(count, torch.float32, dtype)


def compute_module_total_buffer_size(
    model: torch.nn.Module,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
) -> int:
    """Return the bytes of all buffers, see :func:`compute_module_sizes`.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import compute_module_total_buffer_size
        >>> compute_module_total_buffer_size(torch.nn.BatchNorm1d(4))
        40
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def class_names(names: Iterable[str] | str | None) -> frozenset[str]:
    """Return a set of class names, from one, some or none."""
    return frozenset([names] if isinstance(names, str) else names or ())


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Collection[str] | str | None,
) -> tuple[int, list[str]]:
    """Return the bytes of the largest part that is not split, and the names of such parts.

    Args:
        modules: names with modules, or tensors.
        module_sizes: bytes by name, as :func:`compute_module_sizes` returns them.
        no_split_module_classes: names of classes that are not split; modules without children and
            tensors are not either.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import compute_module_sizes, get_max_layer_size
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        >>> get_max_layer_size(list(model.named_children()), compute_module_sizes(model), [])
        (32, ['0'])
    """
    whole = class_names(no_split_module_classes)
    largest, names = 0, []
    waiting = list(reversed(modules))
    while waiting:
        name, module = waiting.pop()
        children = list(module.named_children()) if isinstance(module, torch.nn.Module) else []
        if children and type(module).__name__ not in whole:
            waiting += [(f"{name}.{child}", submodule) for child, submodule in reversed(children)]
            continue
        nbytes = module_sizes.get(name, 0)  # 0: all of it is tied to something before
        if nbytes > largest:
            largest, names = nbytes, [name]
        elif nbytes == largest:
            names.append(name)
    return largest, names


def get_module_leaves(module_sizes: Iterable[str]) -> list[str]:
    """Return the names that are no parents of others, except for the model itself.

    Example:
        >>> from accel_callbacks.utils import get_module_leaves
        >>> get_module_leaves({"": 8, "a": 8, "a.weight": 8})
        ['a.weight']
    """
    names = list(module_sizes)
    parents = {name.rpartition(".")[0] for name in names}
    return [name for name in names if name and name not in parents]


def calculate_maximum_sizes(model: torch.nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a model, and those of its largest layer with the names of such layers.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import calculate_maximum_sizes
        >>> calculate_maximum_sizes(torch.nn.Sequential(torch.nn.Linear(3, 2)))
        (32, (32, ['0']))
    """
    sizes = compute_module_sizes(model)
    largest = get_max_layer_size(
        direct_parts(model), sizes, getattr(model, "_no_split_modules", None)
    )
    return sizes[""], largest


def direct_parts(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return the direct parameters, children and buffers of a module with their names."""
    return [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]


def named_module_tensors(
    module: torch.nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module with their names; tied ones once.

    Args:
        module: the module.
        include_buffers: yield buffers after the parameters.
        recurse: yield those of its children too.
        remove_non_persistent: leave out buffers that are not in a state dict.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import named_module_tensors
        >>> [name for name, _ in named_module_tensors(torch.nn.Linear(2, 1))]
        ['weight', 'bias']
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        skipped = (
            get_non_persistent_buffers(module, recurse=recurse, fqns=True)
            if remove_non_persistent
            else ()
        )
        for name, buffer in module.named_buffers(recurse=recurse):
            if name not in skipped:
                yield name, buffer


def get_non_persistent_buffers(
    module: torch.nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    """Return the names of the buffers that are not in a state dict.

    Args:
        module: the module.
        recurse: those of its children too.
        fqns: return full names, not those within the module that has the buffer.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import get_non_persistent_buffers
        >>> module = torch.nn.Module()
        >>> module.register_buffer("positions", torch.zeros(1), persistent=False)
        >>> get_non_persistent_buffers(module)
        {'positions'}
    """
    modules = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, owner in modules
        for name in owner._non_persistent_buffers_set
    }


def check_tied_parameters_in_config(model: torch.nn.Module) -> bool:
    """Return whether a model of transformers has tied weights, by its config and methods.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import check_tied_parameters_in_config
        >>> check_tied_parameters_in_config(torch.nn.Linear(1, 1))
        False
    """
    if "PreTrainedModel" not in {kind.__name__ for kind in type(model).__mro__}:
        return False
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    head: Any = getattr(model, "get_output_embeddings", lambda: None)
    words = getattr(text, "tie_word_embeddings", False) and head() is not None
    both = getattr(config, "is_encoder_decoder", False)
    stacks = both and getattr(config, "tie_encoder_decoder", False)
    return bool(
        words or stacks or any(hasattr(module, "_tie_weights") for module in model.modules())
    )


def find_tied_parameters(model: torch.nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names that stand for one parameter, in the order of the model.

    Args:
        model: the model.
        kwargs: accepted for Accelerate, and not used.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import find_tied_parameters
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> find_tied_parameters(model)
        [['0.weight', '1.weight']]
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]
