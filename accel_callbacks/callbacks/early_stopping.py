"""EarlyStopping: stop a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.base import ResumableState
from accel_callbacks.callbacks.monitor import Monitor
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["EarlyStopping"]


class EarlyStopping(ResumableState):
    """Stop the run when a metric has not improved for ``patience`` checks, or is good enough.

    Each call of ``accel.log`` with the metric is one check, wherever the loop calls it. With
    several processes the ranks vote on the stop, so all of them stop at the same step even if each
    logs its own value. A stop that ``min_epochs`` or ``min_steps`` defers is decided again by each
    check and at the end of each epoch: a metric that improves again cancels it.

    Args:
        monitor: name of the logged metric.
        patience: checks without improvement before stopping, 3 by default.
        mode: ``"min"`` (default) or ``"max"``; the default warns of a name such as accuracy.
        min_delta: smallest change that counts as improvement, 0 by default.
        check_finite: stop at once when the metric is infinite or NaN.
        stopping_threshold: stop once the metric is better than this.
        divergence_threshold: stop at once when the metric is worse than this.
        min_epochs: epochs to train before a stop for lack of patience or at the threshold.
        min_steps: the same in optimizer steps.
        strict: at the end of a complete epoch (of the second one in a loop without ``run.epochs``,
            where validation comes after the epoch), raise if the metric was never logged on the
            main process. If a second loader is prepared, wait for the first evaluation.

    Attributes:
        best: the best value so far, ``None`` before the first.
        wait_count: checks since the last improvement.
        stop_reason: why it requested a stop, or ``None``.

    Raises:
        ValueError: ``patience``, ``min_epochs`` or ``min_steps`` is negative, or ``mode`` unknown.
        RuntimeError: with ``strict``, during a run: the metric was not logged. The message lists
            the logged metrics.

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

    #: What ``run.early_stopping_callbacks`` looks for.
    is_early_stopping = True

    def __init__(
        self,
        monitor: str,
        patience: int = 3,
        mode: str | None = None,
        min_delta: float = 0.0,
        check_finite: bool = True,
        *,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        min_epochs: int = 0,
        min_steps: int = 0,
        strict: bool = True,
    ) -> None:
        least = {"patience": patience, "min_epochs": min_epochs, "min_steps": min_steps}
        for name, value in least.items():
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative.")
        self.monitor = Monitor(monitor, mode, min_delta)
        self.patience = patience
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.min_epochs, self.min_steps = min_epochs, min_steps
        self.strict = strict
        self._run: TrainingRun | None = None
        self.reset_state()

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        self.best: float | None = None
        self.wait_count = 0
        self.stop_reason: str | None = None
        self._deferred: str | None = None  # reason of a stop that is too early by min_epochs/steps
        self._logged, self._evaluated, self._epochs_unlogged = False, False, 0

    @property
    def state_key(self) -> str:
        """``EarlyStopping:<metric>``, so that several can monitor different metrics."""
        return f"EarlyStopping:{self.monitor.name}"

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the state, unless ``load_state`` restored it."""
        super().setup(run, model, stage)
        self._run = run

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Stop a resumed run that had been stopped before."""
        if self.stop_reason is not None:
            run.stop(self.stop_reason)

    def on_log(self, run: TrainingRun, model: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Check the metric, if it is among the logged ones."""
        value = self.monitor.read(metrics)
        if value is None:
            return
        self._logged = True
        divergence = self._divergence(value)
        self.stop_reason = self.stop_reason or divergence
        if divergence is None:
            self._deferred = self._count_check(value)
        self._stop_unless_too_early(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Stop if the minimum is reached now; with ``strict``, raise if the metric is missing."""
        if self._deferred is not None:
            self._stop_unless_too_early(run)
        # One of several loaders is evaluated, perhaps not in each epoch: the metric may come yet.
        several_loaders = len(getattr(run.accelerator, "loaders", ())) > 1
        awaits_evaluation = several_loaders and not self._evaluated
        if self._is_missing(run) and _is_complete(run) and not awaits_evaluation:
            self._epochs_unlogged += 1
            if self._epochs_unlogged > (0 if run.max_epochs else 1):
                raise RuntimeError(self._missing_text(run))

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """Note that the metric could have been logged by now."""
        self._evaluated = True

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Warn if the metric was never logged."""
        if self._is_missing(run) and self._epochs_unlogged == 0 and run.epochs_done:
            warn(self._missing_text(run))

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Release the run, but keep its stop reason for a later ``save_state``."""
        self.stop_reason, self._run = self._reason_on_any_rank(), None

    def _is_missing(self, run: TrainingRun) -> bool:
        return self.strict and not self._logged and run.is_global_zero

    def _stop_unless_too_early(self, run: TrainingRun) -> None:
        if run.epochs_done >= self.min_epochs and run.global_step >= self.min_steps:
            self.stop_reason = self.stop_reason or self._deferred
        if self.stop_reason is not None:
            run.stop(self.stop_reason)

    def _divergence(self, value: float) -> str | None:
        """Return why the run must stop even before the minimum, or None."""
        name, limit = self.monitor.name, self.divergence_threshold
        if self.check_finite and not math.isfinite(value):
            return f"{name} is {value}"
        if limit is not None and self._is_past(limit, than=value):
            return f"{name} has diverged: {value:.4g} is worse than {limit:.4g}"
        return None

    def _count_check(self, value: float) -> str | None:
        """Count the check; return why the run may stop, or None."""
        name, goal = self.monitor.name, self.stopping_threshold
        if self.monitor.is_better(value, than=self.best):
            self.best, self.wait_count = value, 0
        else:
            self.wait_count += 1
        if goal is not None and self._is_past(value, than=goal):
            return f"{name} has reached {value:.4g}, better than {goal:.4g}"
        if self.wait_count and self.wait_count >= self.patience:
            never = self.best is None
            outcome = "was NaN" if never else f"did not improve on {self.best:.4g}"
            return f"{name} {outcome} in {self.wait_count} checks"
        return None

    def _is_past(self, value: float, *, than: float) -> bool:
        """Return whether a value is better than a limit, without ``min_delta``."""
        return value < than if self.monitor.mode == "min" else value > than

    def _missing_text(self, run: TrainingRun) -> str:
        text = self.monitor.missing_text("EarlyStopping", run.callback_metrics)
        return f"{text} Pass strict=False if it comes later."

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the checks waited, and why the run was stopped, if it was."""
        return {
            "best": self.best,
            "wait_count": self.wait_count,
            "patience": self.patience,
            "stop_reason": self._reason_on_any_rank(),
            "held_back": self._deferred,
            "seen": self._logged,
        }

    def _reason_on_any_rank(self) -> str | None:
        """Return why the run is stopped, if because of this metric, on any rank."""
        agreed = None if self._run is None else self._run.stop_reason
        ours = agreed is not None and agreed.startswith(f"{self.monitor.name} ")
        return agreed if ours else self.stop_reason

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all but ``patience``: a larger one than the saved run's continues the run."""
        self.best = state_dict["best"]
        self.wait_count = state_dict["wait_count"]
        ran_out = self.wait_count >= state_dict["patience"]
        more_patience = ran_out and self.wait_count < self.patience
        self.stop_reason = None if more_patience else state_dict["stop_reason"]
        self._deferred = None if more_patience else state_dict.get("held_back")
        self._logged = state_dict.get("seen", True)


def _is_complete(run: TrainingRun) -> bool:
    """Return whether the epoch was neither cut short by a stop nor left with ``break``."""
    batches = run.num_training_batches
    return not run.epoch_open and (batches == math.inf or run.batch_idx + 1 >= batches)
