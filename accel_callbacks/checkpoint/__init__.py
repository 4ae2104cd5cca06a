"""The training state of an Accelerator: captured, saved, found, checked, restored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {"CheckpointPart": "part", "Load": "part", "RestoreReport": "part"}

# A type checker cannot compute it, and takes the imports below instead.
if not TYPE_CHECKING:
    __all__ = sorted(_HOME)

if TYPE_CHECKING:
    from accel_callbacks.checkpoint.part import CheckpointPart as CheckpointPart
    from accel_callbacks.checkpoint.part import Load as Load
    from accel_callbacks.checkpoint.part import RestoreReport as RestoreReport


__getattr__, __dir__ = lazy_names(__name__, _HOME)
