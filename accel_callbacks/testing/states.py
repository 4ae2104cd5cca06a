"""States of callbacks, compared as flat dicts of their leaves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from accel_callbacks.gradients import local_part
from accel_callbacks.testing.training import FOLDER_PREFIX

__all__ = ["differences", "state_of", "volatile"]

_FOLDER = re.compile(rf"[^\s:]*{FOLDER_PREFIX}\w+")


def state_of(callback: Any) -> dict[str, Any]:
    """Return a copy of a callback's state, flat, with one name for the folders of all trainings."""
    state_dict = getattr(callback, "state_dict", dict)
    return {
        path: _FOLDER.sub("<folder>", value) if isinstance(value, str) else value
        for path, value in _leaves(deepcopy(state_dict())).items()
    }


def differences(
    before: dict[str, Any], after: dict[str, Any], *, but: set[str] | frozenset[str] = frozenset()
) -> str:
    """Describe the differences of two states, except for some paths; empty if there are none."""
    return "; ".join(
        f"{path}: {_show(before, path)} and {_show(after, path)}"
        for path in sorted({*before, *after} - but)
        if path not in before or path not in after or not _is_same(before[path], after[path])
    )


def volatile(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return paths that differ between equal runs: times and random names."""
    kinds = (float, str)
    return {
        path
        for path in before.keys() & after.keys()
        if isinstance(before[path], kinds)
        and isinstance(after[path], kinds)
        and not _is_same(before[path], after[path])
    }


def _leaves(state: Any, path: str = "") -> dict[str, Any]:
    """Flatten a state to its leaves, by a path such as ``best/0``; empty containers are leaves."""
    if isinstance(state, Mapping) and state:
        items = list(state.items())
    elif isinstance(state, (list, tuple)) and state:
        items = list(enumerate(state))
    else:
        return {path: state}
    by_path: dict[str, Any] = {}
    for key, value in items:
        by_path.update(_leaves(value, f"{path}/{key}" if path else str(key)))
    return by_path


def _show(by_path: dict[str, Any], path: str) -> str:
    return repr(by_path[path]) if path in by_path else "nothing"


def _is_same(first: Any, other: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        first, other = local_part(first), local_part(other)
        same_kind = first.shape == other.shape and first.dtype == other.dtype
        return same_kind and torch.allclose(first, other.to(first.device), equal_nan=True)
    if isinstance(first, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(first, float) and isinstance(other, float):
        both_nan = math.isnan(first) and math.isnan(other)
        return both_nan or math.isclose(first, other, rel_tol=1e-6, abs_tol=1e-12)
    return type(first) is type(other) and bool(first == other)
