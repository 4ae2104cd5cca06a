"""Stop a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.monitor import Monitor

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Stops the run when a metric has not improved for ``patience`` checks.

    One check is one call of ``accel.log`` with the metric in it, wherever the loop makes it.
    With several processes the stop is put to the vote, so all of them stop at the same step even
    if each logs its own value.

    Args:
        monitor: name of the logged metric.
        patience: checks without improvement before stopping, 3 by default.
        mode: ``"min"`` (default) or ``"max"``.
        min_delta: smallest change that counts as improvement, 0 by default.
        check_finite: stop at once when the metric is infinite or not a number.

    Attributes:
        best: the best value so far, ``None`` before the first.
        wait_count: checks since the last improvement.
        stop_reason: why it asked for a stop, or ``None``.

    Raises:
        ValueError: ``patience`` is negative, or ``mode`` is unknown.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import EarlyStopping
        >>> accel = Accelerator(cpu=True, callbacks=[EarlyStopping("val/loss", patience=2)])
        >>> with accel.run("demo") as run:
        ...     for epoch in run.epochs(10):
        ...         accel.log({"val/loss": max(1.0, 3.0 - epoch)})
        >>> run.current_epoch, run.stop_reason
        (4, 'val/loss did not improve on 1 in 2 checks')
    """

    can_vote = True

    def __init__(
        self,
        monitor: str,
        patience: int = 3,
        mode: str = "min",
        min_delta: float = 0.0,
        check_finite: bool = True,
    ) -> None:
        if patience < 0:
            raise ValueError(f"patience={patience} must not be negative.")
        self.monitor = Monitor(monitor, mode, min_delta)
        self.patience = patience
        self.check_finite = check_finite
        self.best: float | None = None
        self.wait_count = 0
        self.stop_reason: str | None = None

    @property
    def state_key(self) -> str:
        """``EarlyStopping:<metric>``, so that two of them watch two metrics."""
        return f"EarlyStopping:{self.monitor.name}"

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """A resumed run that had been stopped stays stopped."""
        if self.stop_reason is not None:
            run.stop(self.stop_reason)

    def on_log(self, run: TrainingRun, model: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Check the metric, if it is among those that were logged."""
        value = self.monitor.read(metrics)
        if value is None:
            return
        self._check(value)
        if self.stop_reason is not None:
            run.stop(self.stop_reason)

    def _check(self, value: float) -> None:
        name = self.monitor.name
        if self.check_finite and not math.isfinite(value):
            self.stop_reason = f"{name} is {value}"
        elif self.monitor.is_better(value, than=self.best):
            self.best, self.wait_count = value, 0
        else:
            self.wait_count += 1
            if self.wait_count >= self.patience:
                never = self.best is None
                what = "was no number" if never else f"did not improve on {self.best:.4g}"
                self.stop_reason = f"{name} {what} in {self.wait_count} checks"

    def state_dict(self) -> dict[str, Any]:
        """Best value, checks waited, and whether it stopped the run."""
        return {
            "best": self.best,
            "wait_count": self.wait_count,
            "patience": self.patience,
            "stop_reason": self.stop_reason,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore; ``patience`` stays what the constructor was given, and more of it goes on."""
        self.best = state_dict["best"]
        self.wait_count = state_dict["wait_count"]
        ran_out = self.wait_count >= state_dict["patience"]
        more_patience = ran_out and self.wait_count < self.patience
        self.stop_reason = None if more_patience else state_dict["stop_reason"]
