"""States of callbacks: what they may hold, and whether two are the same."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from accel_callbacks.testing.training import FOLDER_PREFIX

__all__ = ["differences", "foreign", "state_of", "volatile"]

_FOLDER = re.compile(rf"[^\s:]*{FOLDER_PREFIX}\w+")
_PLAIN = (bool, int, float, str, type(None))


def state_of(callback: Any) -> Any:
    """A copy of a callback's state, in which the folders of tiny trainings have one name."""
    give = getattr(callback, "state_dict", None)
    return _moved(deepcopy(give())) if give is not None else {}


def _moved(state: Any) -> Any:
    if isinstance(state, str):
        return _FOLDER.sub("<folder>", state)
    if type(state) in (list, tuple, dict):
        items = ((k, _moved(v)) for k, v in state.items()) if isinstance(state, dict) else None
        return type(state)(items if items is not None else map(_moved, state))
    return state


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """What a state holds, by a path such as ``best/0``; a container without content is a leaf."""
    if isinstance(state, Mapping) and state:
        items = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, (list, tuple)) and state:
        items = [(str(index), value) for index, value in enumerate(state)]
    else:
        return {path: state}
    found: dict[str, Any] = {}
    for key, value in items:
        found.update(leaves(value, f"{path}/{key}" if path else key))
    return found


def foreign(state: Any, path: str = "state_dict()") -> list[str]:
    """What must not be in a state: keys that are no text, objects that are no plain values."""
    if isinstance(state, Mapping):
        wrong = [f"a key of {path} is {key!r}" for key in state if not isinstance(key, str)]
        return wrong + [w for key, one in state.items() for w in foreign(one, f"{path}[{key!r}]")]
    if isinstance(state, (list, tuple)):
        return [wrong for i, one in enumerate(state) for wrong in foreign(one, f"{path}[{i}]")]
    if isinstance(state, (*_PLAIN, torch.Tensor)):
        return []
    return [f"{path} is a {type(state).__qualname__}"]


def differences(first: Any, second: Any, *, but: set[str] | frozenset[str] = frozenset()) -> str:
    """What two states do not have in common, as text; empty if they are the same."""
    one, other = leaves(first), leaves(second)
    told = [
        f"{path}: {_shown(one, path)} and {_shown(other, path)}"
        for path in sorted({*one, *other} - but)
        if path not in one or path not in other or not _same(one[path], other[path])
    ]
    return "; ".join(told)


def volatile(first: Any, second: Any) -> set[str]:
    """What differs between two runs that did the same because it is of a clock or a random name."""
    one, other = leaves(first), leaves(second)
    return {
        path
        for path in {*one, *other}
        if isinstance(one.get(path), (float, str))
        and isinstance(other.get(path), (float, str))
        and not _same(one[path], other[path])
    }


def _shown(found: dict[str, Any], path: str) -> str:
    return repr(found[path]) if path in found else "nothing"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.allclose(one, other.to(one.device), equal_nan=True)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    return type(one) is type(other) and bool(one == other)
