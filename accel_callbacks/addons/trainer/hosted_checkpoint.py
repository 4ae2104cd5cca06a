"""HostedCheckpoint: a `Checkpoint` in the Trainer of transformers, which saves what it saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_callbacks.addons.trainer.trainer_mirror import Mirror
from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.checkpoint import Checkpoint, Keep
from accel_callbacks.distributed.failures import shared_failure

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["HostedCheckpoint"]

_REFUSED = {
    "monitor": "give metric_for_best_model and load_best_model_at_end to TrainingArguments",
    "saves_on_exception": "the Trainer has no event for it; give an interval",
    "memory_every_n_steps": "the Trainer resumes from its own folder",
    "trainable_only": "the Trainer decides what a checkpoint holds",
}


class HostedCheckpoint(Callback):
    """Let the Trainer save when a `Checkpoint` is due, and copy each of its checkpoints.

    Args:
        checkpoint: gives the intervals, the folder or URL, and which copies to keep.
        trainer: into whose ``output_dir`` the newest copy is fetched, unless it is there.

    Raises:
        TypeError: the trainer is missing.
        ValueError: the `Checkpoint` has no folder, or an option that only ``accel.run`` has.
    """

    collective = True

    def __init__(self, checkpoint: Checkpoint, trainer: Any) -> None:
        name = type(checkpoint).__name__
        if trainer is None:
            raise TypeError(
                f"{name} fetches the newest copy into the Trainer's folder: call "
                f"to_transformers({name}(...), trainer=trainer), before trainer.train."
            )
        for option, advice in _REFUSED.items():
            if getattr(checkpoint, option):
                raise ValueError(
                    f"{name}({option.removeprefix('saves_')}=...) needs accel.run: {advice}."
                )
        if checkpoint.dirpath is None:
            raise ValueError(
                f"{name} needs a folder or URL beside the Trainer's output_dir: give dirpath."
            )
        self.can_vote = True
        self._checkpoint = checkpoint
        self._mirror = Mirror(checkpoint.dirpath, checkpoint.storage_options)
        self._last_step = 0
        with shared_failure(f"fetching from {checkpoint.dirpath}"):
            if trainer.args.local_process_index == 0:
                self._mirror.fetch(trainer.args.output_dir)

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Count steps and time from here."""
        self._last_step = run.global_step
        self._checkpoint.schedule.restart_clock(run)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask the Trainer to save if an interval of steps or time ends here."""
        before, self._last_step = self._last_step, run.global_step
        schedule = self._checkpoint.schedule
        if schedule.step_is_due(run.global_step, None, before) or schedule.clock_is_due(run):
            run.save_now(self._checkpoint.state_key)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Ask it if an interval of epochs ends here."""
        if self._checkpoint.schedule.epoch_is_due(run.epochs_done):
            run.save_now(self._checkpoint.state_key)

    def on_checkpoint_saved(self, run: TrainingRun, model: Any, path: str) -> None:
        """Copy the checkpoint, once the copy of the one before is durable."""
        checkpoint = self._checkpoint
        checkpoint.schedule.restart_clock(run)
        with shared_failure(f"copying to {checkpoint.dirpath}"):
            if run.is_global_zero:
                self._wait()
                retention = checkpoint.retention
                keep: Keep | None = None if retention.keeps_all else retention
                self._mirror.put(path, run.global_step, keep, None)
                if not checkpoint.async_save:
                    self._wait()

    def on_fit_end(self, run: TrainingRun, model: Any) -> None:
        """Wait for the last copy."""
        with shared_failure(f"copying to {self._checkpoint.dirpath}"):
            if run.is_global_zero:
                self._wait()

    def _wait(self) -> None:
        if self._checkpoint.when_failed == "raise":
            self._mirror.wait()
        else:
            self._mirror.wait_and_warn()
