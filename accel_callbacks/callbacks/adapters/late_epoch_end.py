"""The end of an epoch for callbacks that watch a metric, in a loop without ``run.epochs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["LateEpochEnd"]


class LateEpochEnd:
    """In Lightning an epoch's end comes after its validation.

    Where ``run.epochs`` counts it does here too. In a plain loop the pass over the training data is
    the epoch, and its validation comes later: a callback that watches a metric then meets the
    epoch's end when the metric is logged, or at the latest when the next epoch begins.

    Args:
        callback: has a ``monitor`` if it watches something.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks.adapters.late_epoch_end import LateEpochEnd
        >>> LateEpochEnd(object()).put_off(Accelerator(cpu=True).current_run)
        False
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._epoch: int | None = None

    def put_off(self, run: TrainingRun) -> bool:
        """Whether this end has to wait."""
        watches = getattr(self._callback, "monitor", None) is not None
        if not watches or run.accelerator.loop.epochs_counted:
            return False
        self._epoch = run.current_epoch
        return True

    def may_end(self, run: TrainingRun, metrics: Mapping[str, Any]) -> bool:
        """Whether what was waited for is there.

        On several processes it waits for the next epoch: not all of them need to log it.
        """
        if self._epoch is None or collectives.world_size() > 1:
            return False
        return self._callback.monitor in metrics

    def take(self) -> int | None:
        """The epoch whose end was put off, once."""
        epoch, self._epoch = self._epoch, None
        return epoch
