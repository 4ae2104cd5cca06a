"""In which types a model computes: one precision a run, a file each.

The Accelerator takes one by ``create_precision``, which `accel_callbacks.engine_options` has beside
the table of names. From then on ``prepare`` calls `Precision.wrap`, ``backward`` scales the loss by
it, and a prepared optimizer steps through it. A new one is a subclass of `Precision`, or of
`accel_callbacks.precision.amp.Autocast`, and a line of that table.

Nothing here casts parameters, which stay in fp32, and nothing may depend on which engine trains: an
engine that casts and scales by itself gets an `EnginePrecision`. Whether a step is skipped must be
the same on all ranks, or their weights part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names
from accel_callbacks.precision.base import EnginePrecision, Precision

if TYPE_CHECKING:
    from accel_callbacks.engine_options import create_precision as create_precision
    from accel_callbacks.precision.amp import BF16 as BF16
    from accel_callbacks.precision.fp16 import FP16 as FP16

__all__ = ["BF16", "FP16", "EnginePrecision", "Precision", "create_precision"]

# Scripts may import the class of another room from here too.
_HOME = {
    "BF16": "amp",
    "FP16": "fp16",
    "FP8": ".models.fp8",
    "create_precision": ".engine_options",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
