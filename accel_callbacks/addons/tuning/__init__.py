"""Find a batch size or a learning rate with trial steps that change nothing in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {
    "BatchSizeResult": "batch_size",
    "LRResult": "learning_rate",
    "Trial": "batch_size",
    "find_batch_size": "batch_size",
    "find_learning_rate": "learning_rate",
}

# A type checker cannot compute it, and takes the imports below instead.
if not TYPE_CHECKING:
    __all__ = sorted(_HOME)

if TYPE_CHECKING:
    from accel_callbacks.addons.tuning.batch_size import BatchSizeResult as BatchSizeResult
    from accel_callbacks.addons.tuning.batch_size import Trial as Trial
    from accel_callbacks.addons.tuning.batch_size import find_batch_size as find_batch_size
    from accel_callbacks.addons.tuning.learning_rate import LRResult as LRResult
    from accel_callbacks.addons.tuning.learning_rate import find_learning_rate as find_learning_rate


__getattr__, __dir__ = lazy_names(__name__, _HOME)
