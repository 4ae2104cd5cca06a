"""From any configuration to plain JSON types, so that no tracker can trip over an odd value."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

_MAX_DEPTH = 16
_MAX_REPR = 500


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with nothing but dict, list, str, int, float, bool and None in it.

    Dataclasses and namespaces become dicts, sets and tuples lists, classes and functions their
    dotted names, 0-d arrays and tensors numbers, everything else a string. NaN stays a float.

    Args:
        config: a mapping, a dataclass instance or an ``argparse.Namespace``; any nesting.

    Returns:
        A new dict that shares nothing with ``config``.

    Raises:
        TypeError: ``config`` is not one of these.

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


def flat_config(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return ``config`` as ``{"optimizer/lr": 0.1}``; lists and None become strings.

    >>> flat_config({"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "seed": None})
    {'optimizer/lr': 0.1, 'optimizer/betas': '[0.9, 0.99]', 'seed': 'None'}
    """
    flat: dict[str, str | int | float | bool] = {}
    _flatten_into(flat, plain_config(config), "")
    return flat


def _flatten_into(
    flat: dict[str, str | int | float | bool], config: Mapping[str, Any], prefix: str
) -> None:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            _flatten_into(flat, value, f"{prefix}{key}/")
        else:
            scalar = isinstance(value, str | int | float)
            flat[prefix + key] = value if scalar else str(value)


def _plain(value: Any, depth: int) -> Any:
    """Convert one value; beyond a sane depth (a dict that holds itself) only its type is kept."""
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
        return [_plain(item, depth + 1) for item in _ordered(value)]
    return _number_or_text(value)


def _ordered(value: Iterable[Any]) -> Iterable[Any]:
    """Sort sets: their own order changes from process to process."""
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else value


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return the named parts of a mapping, dataclass or namespace; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return vars(value) if isinstance(value, SimpleNamespace | Namespace) else None


def _number_or_text(value: Any) -> Any:
    """Read 0-d arrays and tensors; everything else becomes text."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        try:
            item = value.item()
        except Exception:  # a meta tensor, say: a config must never stop a run
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
    except Exception:  # someone else's __str__
        return kind
    return kind if " at 0x" in text or len(text) > _MAX_REPR else text
