"""Flatten logged values, copy them from their devices, and convert configs to JSON types.

0-d tensors on an accelerator stay tensors in flat values until `to_host`.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import numbers
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from loggers.redaction import redacted

__all__ = [
    "copy_to_host",
    "flat_config",
    "flatten",
    "order_before_reads",
    "plain_config",
    "stored_config",
    "to_host",
]

FlatValues = dict[str, Any]
_MAX_DEPTH = 16  # of a config
_MAX_REPR = 500  # characters
_TENSORS: set[type] = set()  # torch's own class once it was seen, for torch may not be installed


def _ignore(name: str) -> None:
    """Drop a None without a warning."""


def flatten(values: Mapping[str, Any], on_none: Callable[[str], None] = _ignore) -> FlatValues:
    """Return ``values`` flat and normalized, as `TrackerHub.log` records them.

    Args:
        values: numbers, 0-d tensors, str, None, and dicts of these.
        on_none: called with each key whose value is None; such values are dropped.

    Raises:
        TypeError: a key is not a str, or a value is not a number, 0-d tensor, str, dict or None.
        ValueError: two spellings of one key, such as ``{"a/b": 1, "a": {"b": 2}}``.

    Example:
        >>> flatten({"val": {"loss": 0.5, "note": None}, "lr": 1})
        {'val/loss': 0.5, 'lr': 1}
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"log expects a dict of values, got {_kind(values)}")
    flat: FlatValues = {}
    tensors: list[str] = []
    _flatten_into(flat, values, on_none, tensors)
    if tensors:
        _copy_tensors(flat, tensors)
    return flat


def _flatten_into(
    flat: FlatValues,
    values: Mapping[str, Any],
    on_none: Callable[[str], None],
    tensors: list[str],
    prefix: str = "",
) -> None:
    """Add one level of ``values`` to ``flat``, and the names of device tensors to ``tensors``."""
    for key, value in values.items():
        if not isinstance(key, str):
            raise TypeError(f"log keys are str, got {_kind(key)} {key!r} under {prefix!r}")
        name = prefix + key
        # Hot path: floats and 0-d float tensors on the CPU, the most common values.
        kind = type(value)
        leaf: Any = value.item() if kind in _TENSORS and value.is_cpu and not value.ndim else value
        if type(leaf) is float and name not in flat:
            flat[name] = leaf
        elif value is None:
            on_none(name)
        elif isinstance(value, Mapping):
            _flatten_into(flat, value, on_none, tensors, f"{name}/")
        elif name in flat:
            raise ValueError(f"log got {name!r} twice, once nested and once with a slash")
        else:
            flat[name] = leaf = _leaf(name, value)
            if not isinstance(leaf, float | int | str):
                tensors.append(name)


def _copy_tensors(flat: FlatValues, keys: list[str]) -> None:
    """Copy tensors on their device, because the loop may change them in place afterwards.

    Tensors of one device and dtype are copied by one kernel, because launches are the cost on the
    training thread.
    """
    torch = sys.modules["torch"]
    groups: dict[Any, list[str]] = {}
    for name in keys:
        tensor = flat[name]
        groups.setdefault((tensor.device, tensor.dtype), []).append(name)
    for (device, _), names in groups.items():
        tensors = [flat[name].detach() for name in names]
        copies = [tensors[0].clone()] if len(tensors) == 1 else torch.stack(tensors).unbind()
        flat.update(zip(names, copies, strict=True))
        if device.type == "cuda":
            order_before_reads(device)


def order_before_reads(device: Any) -> None:
    """Make the default CUDA stream, on which the hub's thread reads, wait for the current one."""
    torch = sys.modules["torch"]
    if torch._C._cuda_getCurrentRawStream(device.index):  # 0 is the default stream
        torch.cuda.default_stream(device).wait_stream(torch.cuda.current_stream(device))


def _leaf(name: str, value: Any) -> Any:
    """Return one value as float, int or str; a tensor on an accelerator is returned unchanged."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_leaf(name, value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):  # bool, int, numpy integers
        return int(value)
    if isinstance(value, numbers.Real):  # float, numpy floats, fractions
        return float(value)
    if _is_numpy(value) and value.ndim == 0:
        return _number(name, value.item())
    raise TypeError(
        f"log cannot record {name!r}: {_kind(value)}. It takes numbers, 0-d arrays and tensors, "
        "str, None and dicts of these; reduce anything else first, for example with .mean()"
    )


def _tensor_leaf(name: str, tensor: Any) -> Any:
    """Check a 0-d tensor, and read it if it is on the CPU."""
    if tensor.ndim != 0 or tensor.is_complex():
        raise TypeError(
            f"log cannot record {name!r}: a {tensor.dtype} tensor of shape {tuple(tensor.shape)}. "
            "Reduce it to one real number first, for example with .mean()"
        )
    plain = type(tensor) is sys.modules["torch"].Tensor
    if plain:
        _TENSORS.add(type(tensor))
    # Reading a DTensor is a collective, and not all ranks log.
    if not plain and hasattr(tensor, "full_tensor"):
        raise TypeError(f"log cannot record {name!r}: a DTensor. Log .full_tensor() of it")
    if tensor.is_meta:
        raise TypeError(f"log cannot record {name!r}: a tensor on the meta device has no value")
    if tensor.is_cpu:  # cheaper than a clone, and no device to synchronize with
        return _number(name, tensor.item())
    return tensor


def _number(name: str, value: Any) -> Any:
    """Check a result of ``.item()``: numpy has 0-d arrays of objects and of complex numbers."""
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"log cannot record {name!r}: {_kind(value)} is not a real number")


def _is_numpy(value: Any) -> bool:
    """Return whether ``value`` is a numpy array or scalar, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def _kind(value: Any) -> str:
    """Return a value's type, and its shape if it has one, for an error."""
    shape = getattr(value, "shape", None)
    name = type(value).__name__
    return name if shape is None else f"{name} of shape {tuple(shape)}"


def to_host(rows: Iterable[FlatValues]) -> list[Exception]:
    """Replace the tensors in ``rows`` by numbers, with one copy per device; idempotent.

    Values of a device that cannot be read, e.g. because it failed, are dropped; the error is
    returned.
    """
    by_device: dict[Any, list[tuple[FlatValues, str, Any]]] = {}
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    for row in rows:
        for name, value in row.items():
            if type(value) is not float and isinstance(value, torch.Tensor):
                by_device.setdefault(value.device, []).append((row, name, value))
    errors = []
    for entries in by_device.values():
        try:
            read = copy_to_host([tensor for _, _, tensor in entries])
        except Exception as error:
            errors.append(error)
            for row, name, _ in entries:
                del row[name]
        else:
            for (row, name, _), number in zip(entries, read, strict=True):
                row[name] = number
    return errors


def copy_to_host(tensors: list[Any]) -> list[float | int]:
    """Read 0-d tensors of one device with a single copy; integers are exact up to 2**53."""
    torch = sys.modules["torch"]
    by_dtype: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    stacks = [torch.stack([tensors[i] for i in group]) for group in by_dtype.values()]
    try:
        wide = torch.cat([stack.to(torch.float64) for stack in stacks])
    except (TypeError, RuntimeError):  # MPS has no float64
        wide = torch.cat([stack.to(torch.float32) for stack in stacks])
    result: list[float | int] = [0] * len(tensors)
    order = [index for group in by_dtype.values() for index in group]
    for index, number in zip(order, _numbers(wide), strict=True):
        is_float = tensors[index].dtype.is_floating_point
        result[index] = number if is_float else int(number)
    return result


def _numbers(wide: Any) -> list[float]:
    """Copy a tensor to the host, waiting for this copy only and without spinning.

    Other threads keep using the device and the CPU meanwhile.
    """
    if not wide.is_cuda:
        return wide.tolist()  # type: ignore[no-any-return]
    torch = sys.modules["torch"]
    host = torch.empty(wide.shape, dtype=wide.dtype, device="cpu", pin_memory=True)
    host.copy_(wide, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record(torch.cuda.current_stream(wide.device))
    copied.synchronize()
    return host.tolist()  # type: ignore[no-any-return]


# --- configs -------------------------------------------------------------------------------------


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` converted to dict, list, str, int, float, bool and None.

    Dataclasses and namespaces become dicts, sets and tuples lists, classes and functions their
    dotted names, 0-d arrays and tensors numbers, everything else strings. NaN stays a float.

    Args:
        config: a mapping, a dataclass instance or an ``argparse.Namespace``; any nesting.

    Returns:
        A new dict that shares no objects with ``config``.

    Raises:
        TypeError: ``config`` is not one of these.

    Example:
        >>> from pathlib import Path
        >>> plain_config({"lr": 1e-3, "betas": (0.9, 0.99), "data": Path("in"), "act": print})
        {'lr': 0.001, 'betas': [0.9, 0.99], 'data': 'in', 'act': 'builtins.print'}
    """
    plain = _plain(config, 0)
    if not isinstance(plain, dict):
        raise TypeError(
            f"a config is a dict, a dataclass or a Namespace, got {type(config).__name__}: "
            "pass vars(args), or put the value into a dict"
        )
    return plain


def stored_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` as :func:`plain_config` does, with a placeholder for each secret.

    That is what trackers write into files. A service gets the config as it is.

    Example:
        >>> stored_config({"lr": 0.1, "data": "https://store/a.tar?sig=abc"})
        {'lr': 0.1, 'data': 'https://store/a.tar?sig=(set, not shown)'}
    """
    plain: dict[str, Any] = redacted(plain_config(config))
    return plain


def flat_config(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return ``config`` as ``{"optimizer/lr": 0.1}``; lists and None become strings.

    Example:
        >>> flat_config({"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "seed": None})
        {'optimizer/lr': 0.1, 'optimizer/betas': '[0.9, 0.99]', 'seed': 'None'}
    """
    flat: dict[str, str | int | float | bool] = {}
    _flatten_config_into(flat, plain_config(config), "")
    return flat


def _flatten_config_into(
    flat: dict[str, str | int | float | bool], config: Mapping[str, Any], prefix: str
) -> None:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            _flatten_config_into(flat, value, f"{prefix}{key}/")
        else:
            scalar = isinstance(value, str | int | float)
            flat[prefix + key] = value if scalar else str(value)


def _plain(value: Any, depth: int) -> Any:
    """Convert one value; below a maximum depth (a dict that contains itself) only its text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if depth > _MAX_DEPTH:
        return _text(value)
    fields = _fields(value)
    if fields is not None:
        return {str(key): _plain(item, depth + 1) for key, item in fields.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in _sort_sets(value)]
    return _number_or_text(value)


def _sort_sets(value: Iterable[Any]) -> Iterable[Any]:
    """Sort sets, whose order differs from process to process."""
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else value


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return the fields of a mapping, dataclass or namespace; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return vars(value) if isinstance(value, SimpleNamespace | Namespace) else None


def _number_or_text(value: Any) -> Any:
    """Return the number in a 0-d array or tensor; everything else as text."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        try:
            item = value.item()
        except Exception:  # e.g. a meta tensor: a config must never stop a run
            return _text(value)
        return item if isinstance(item, str | int | float) else _text(item)
    return _text(value)


def _text(value: Any) -> str:
    """Return a short text without memory addresses, so that two runs' configs compare equal."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{kind}(shape={list(shape)})"
    try:
        text = str(value)
    except Exception:  # a user-defined __str__
        return kind
    return kind if " at 0x" in text or len(text) > _MAX_REPR else text
