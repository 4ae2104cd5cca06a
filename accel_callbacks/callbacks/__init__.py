"""Callbacks: the base class and the built-in ones, one file each, one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

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


__getattr__, __dir__ = lazy_names(__name__, _HOME)
