"""Callbacks: the base class and the built-in ones, one file each, one line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Callback": "base",
    "Checkpoint": "checkpoint",
    "EarlyStopping": "early_stopping",
    "ProgressBar": "progress_bar",
}

__all__ = ["Callback", "Checkpoint", "EarlyStopping", "ProgressBar"]

if TYPE_CHECKING:
    from accel_callbacks.callbacks.base import Callback as Callback
    from accel_callbacks.callbacks.checkpoint import Checkpoint as Checkpoint
    from accel_callbacks.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from accel_callbacks.callbacks.progress_bar import ProgressBar as ProgressBar


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
