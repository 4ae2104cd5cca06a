"""Stop a run whose metric no longer improves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.monitor import Monitor
from accel_callbacks.callbacks.resumable_state import ResumableState
from accel_callbacks.errors import nearest

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["EarlyStopping"]


class EarlyStopping(ResumableState):
    """Stops the run when a metric has not improved for ``patience`` checks, or is good enough.

    One check is one call of ``accel.log`` with the metric in it, wherever the loop makes it.
    With several processes the stop is put to the vote, so all of them stop at the same step even
    if each logs its own value. A stop that ``min_epochs`` or ``min_steps`` hold back is decided
    anew by each check and at each epoch's end: a metric that improves again takes it back.

    Args:
        monitor: name of the logged metric.
        patience: checks without improvement before stopping, 3 by default.
        mode: ``"min"`` (default) or ``"max"``.
        min_delta: smallest change that counts as improvement, 0 by default.
        check_finite: stop at once when the metric is infinite or not a number.
        stopping_threshold: stop once the metric is better than this.
        divergence_threshold: stop at once when the metric is worse than this.
        min_epochs: epochs to train before it stops for lack of patience or at the threshold.
        min_steps: optimizer steps, likewise.
        strict: at the end of a whole epoch (of the second in a loop without ``run.epochs``, whose
            validation comes after it), raise if the metric was never logged on the main process. It
            waits for the first evaluation where a further loader is prepared for one.

    Attributes:
        best: the best value so far, ``None`` before the first.
        wait_count: checks since the last improvement.
        stop_reason: why it asked for a stop, or ``None``.

    Raises:
        ValueError: ``patience``, ``min_epochs`` or ``min_steps`` is negative, or ``mode`` unknown.
        RuntimeError: with ``strict``, in a run: the metric was not logged. It lists what was.

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
        self._held_back: str | None = None  # what the last check would stop for, later on
        self._seen, self._evaluated, self._unseen_epochs = False, False, 0

    @property
    def state_key(self) -> str:
        """``EarlyStopping:<metric>``, so that two of them watch two metrics."""
        return f"EarlyStopping:{self.monitor.name}"

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the state, unless ``load_state`` restored it."""
        super().setup(run, model, stage)
        self._run = run

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """A resumed run that had been stopped stays stopped."""
        if self.stop_reason is not None:
            run.stop(self.stop_reason)

    def on_log(self, run: TrainingRun, model: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Check the metric, if it is among those that were logged."""
        value = self.monitor.read(metrics)
        if value is None:
            return
        self._seen = True
        alarm = self._alarm(value)
        self.stop_reason = self.stop_reason or alarm
        if alarm is None:
            self._held_back = self._verdict(value)
        self._stop_if_long_enough(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Stop if what held the stop back is over; with ``strict``, miss the metric."""
        if self._held_back is not None:
            self._stop_if_long_enough(run)
        if self._misses(run) and _is_whole(run) and not self._awaits_evaluation(run):
            self._unseen_epochs += 1
            if self._unseen_epochs > (0 if run.max_epochs else 1):
                raise RuntimeError(self._missed(run))

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """From now on the metric could have been logged."""
        self._evaluated = True

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Say so where the metric never came."""
        if self._misses(run) and self._unseen_epochs == 0 and run.epochs_done:
            warnings.warn(self._missed(run), stacklevel=2)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Let go of the run, but remember its verdict for a ``save_state`` after it."""
        self.stop_reason, self._run = self._agreed(), None

    def _misses(self, run: TrainingRun) -> bool:
        return self.strict and not self._seen and run.is_global_zero

    def _awaits_evaluation(self, run: TrainingRun) -> bool:
        return not self._evaluated and len(getattr(run.accelerator, "loaders", ())) > 1

    def _stop_if_long_enough(self, run: TrainingRun) -> None:
        if run.epochs_done >= self.min_epochs and run.global_step >= self.min_steps:
            self.stop_reason = self.stop_reason or self._held_back
        if self.stop_reason is not None:
            run.stop(self.stop_reason)

    def _alarm(self, value: float) -> str | None:
        """Why the run must not go on, whatever the minimum."""
        name, limit = self.monitor.name, self.divergence_threshold
        if self.check_finite and not math.isfinite(value):
            return f"{name} is {value}"
        if limit is not None and self._beyond(limit, than=value):
            return f"{name} has diverged: {value:.4g} is worse than {limit:.4g}"
        return None

    def _verdict(self, value: float) -> str | None:
        """Count the check; why the run need not go on, or None."""
        name, goal = self.monitor.name, self.stopping_threshold
        if self.monitor.is_better(value, than=self.best):
            self.best, self.wait_count = value, 0
        else:
            self.wait_count += 1
        if goal is not None and self._beyond(value, than=goal):
            return f"{name} has reached {value:.4g}, better than {goal:.4g}"
        if self.wait_count and self.wait_count >= self.patience:
            never = self.best is None
            what = "was no number" if never else f"did not improve on {self.best:.4g}"
            return f"{name} {what} in {self.wait_count} checks"
        return None

    def _beyond(self, value: float, *, than: float) -> bool:
        """Whether a value is better than a limit, however little."""
        return value < than if self.monitor.mode == "min" else value > than

    def _missed(self, run: TrainingRun) -> str:
        name, logged = self.monitor.name, sorted(run.callback_metrics)
        hint = nearest(name, logged)
        listed = f"but {', '.join(logged)}" if logged else "and nothing else either"
        return (
            f"EarlyStopping watches {name!r}, which was not logged by the end of an epoch, "
            f"{listed}.{hint} Pass strict=False if it comes later."
        )

    def state_dict(self) -> dict[str, Any]:
        """Best value, checks waited, and whether it stopped the run, on whichever process."""
        return {
            "best": self.best,
            "wait_count": self.wait_count,
            "patience": self.patience,
            "stop_reason": self._agreed(),
            "held_back": self._held_back,
            "seen": self._seen,
        }

    def _agreed(self) -> str | None:
        """Why the run is stopped, if for this metric, whichever process asked for it."""
        agreed = None if self._run is None else self._run.stop_reason
        own = agreed is not None and agreed.startswith(f"{self.monitor.name} ")
        return agreed if own else self.stop_reason

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore; ``patience`` stays what the constructor was given, and more of it goes on."""
        self.best = state_dict["best"]
        self.wait_count = state_dict["wait_count"]
        ran_out = self.wait_count >= state_dict["patience"]
        more_patience = ran_out and self.wait_count < self.patience
        self.stop_reason = None if more_patience else state_dict["stop_reason"]
        self._held_back = None if more_patience else state_dict.get("held_back")
        self._seen = state_dict.get("seen", True)


def _is_whole(run: TrainingRun) -> bool:
    """Whether the epoch was neither cut short by a stop nor left with ``break``."""
    batches = run.num_training_batches
    return not run.epoch_open and (batches == math.inf or run.batch_idx + 1 >= batches)
