"""``trainer.fit_loop`` and its like: the few counters that callbacks read from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.adapters.missing import Missing, Part

if TYPE_CHECKING:
    from accel_callbacks.integrations.lightning.trainer import TrainerFacade

__all__ = ["LoggerConnectorFacade", "evaluation_loop_facade", "fit_loop_facade"]


class _FitLoop(Part):
    """``trainer.fit_loop``."""

    _trainer: TrainerFacade

    @property
    def max_epochs(self) -> int | None:
        """What ``run.epochs`` was called with."""
        return self._trainer.accel_run.max_epochs

    @property
    def total_batch_idx(self) -> int:
        """Index of the training batch, counted over all epochs."""
        run = self._trainer.accel_run
        batches = run.num_training_batches
        before = 0 if math.isinf(batches) else run.current_epoch * int(batches)
        return before + run.batch_idx

    @property
    def batch_idx(self) -> int:
        """Index of the training batch in its epoch."""
        return self._trainer.accel_run.batch_idx

    def _should_accumulate(self) -> bool:
        """The gradient window goes on after this batch."""
        return self._trainer.accel_run.accelerator.loop.window.is_open


class _EpochLoop(Part):
    """``trainer.fit_loop.epoch_loop``."""

    _trainer: TrainerFacade

    @property
    def _batches_that_stepped(self) -> int:
        """What Lightning's loggers take for the step."""
        return self._trainer.accel_run.global_step

    global_step = _batches_that_stepped

    @property
    def total_batch_idx(self) -> int:
        """Index of the training batch, counted over all epochs."""
        return int(self._trainer.fit_loop.total_batch_idx)

    @property
    def batch_progress(self) -> Part:
        """How far the epoch is."""
        run, missing = self._trainer.accel_run, self._missing
        path = f"{self._path}.batch_progress"
        ready = run.batch_idx + 1
        return Part(
            path,
            missing,
            is_last_batch=run.is_last_batch,
            current=_progress(f"{path}.current", missing, ready),
            total=_progress(f"{path}.total", missing, self.total_batch_idx + 1),
        )

    def _should_check_val_epoch(self) -> bool:
        """Whether the epoch has a validation; unknown before the first."""
        return bool(self._trainer.accel_run.num_val_batches)


class _EvaluationLoop(Part):
    """``trainer.validate_loop`` and ``trainer.test_loop``."""

    _trainer: TrainerFacade
    _batches: dict[str, int]

    @property
    def _has_run(self) -> bool:
        """Whether there was such an evaluation."""
        return bool(self._trainer.accel_run.num_val_batches)

    @property
    def batch_progress(self) -> Part:
        """Batches so far, in this evaluation and in all."""
        path, missing = f"{self._path}.batch_progress", self._missing
        return Part(
            path,
            missing,
            current=_progress(f"{path}.current", missing, self._batches["current"]),
            total=_progress(f"{path}.total", missing, self._batches["total"]),
        )


def _progress(path: str, missing: Missing, ready: int) -> Part:
    return Part(path, missing, ready=ready, started=ready, processed=ready, completed=ready)


class LoggerConnectorFacade(Part):
    """``trainer._logger_connector``."""

    _trainer: TrainerFacade

    @property
    def should_update_logs(self) -> bool:
        """Whether this step, or this batch of an evaluation, is one of every so many."""
        trainer = self._trainer
        every = trainer.log_every_n_steps
        if not every:
            return False
        if trainer.evaluating:
            step = trainer._evaluation_loop.batch_progress.current.ready
        else:
            step = trainer.global_step + 1  # asked before the step too
        return bool(step % every == 0 or trainer.should_stop)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """To the trackers, under the optimizer step: trackers want steps that never go back."""
        if metrics:
            self._trainer.accel_run.accelerator.log(metrics)


def fit_loop_facade(trainer: TrainerFacade, missing: Missing) -> Part:
    """``trainer.fit_loop`` with its epoch loop, and the validation loop in it."""
    path = "trainer.fit_loop.epoch_loop"
    val_loop = evaluation_loop_facade(trainer, missing, f"{path}.val_loop")
    epoch_loop = _EpochLoop(path, missing, _trainer=trainer, val_loop=val_loop)
    return _FitLoop("trainer.fit_loop", missing, _trainer=trainer, epoch_loop=epoch_loop)


def evaluation_loop_facade(trainer: TrainerFacade, missing: Missing, path: str) -> Part:
    """An evaluation's loop, whose counts the trainer keeps."""
    return _EvaluationLoop(path, missing, _trainer=trainer, _batches=trainer.evaluated)
