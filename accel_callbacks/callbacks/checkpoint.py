"""Save the whole training state at intervals, keep the newest and the best, find the newest."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_callbacks import checkpointing, collectives
from accel_callbacks.background_saves import Then, check_when_busy
from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.checkpoint_keep import Keep, Retention
from accel_callbacks.callbacks.checkpoint_notes import Place, SaveNotes
from accel_callbacks.callbacks.checkpoint_schedule import Schedule
from accel_callbacks.callbacks.monitor import Monitor
from accel_callbacks.callbacks.on_exception_checkpoint import save_after_error
from accel_callbacks.distributed.failures import shared_failure

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun
    from checkpoint_io import CheckpointFolder

__all__ = ["Checkpoint"]


class Checkpoint(Callback):
    """Saves checkpoints into a folder on any store, and lets a run resume from the newest.

    Checkpoints are named ``step-<global step>``. Step intervals are counted in optimizer steps
    and saved at the end of the loop's body; epoch intervals at the end of the epoch, after its
    validation. The finished run is saved too, and so is one that gives way to another job. Training
    goes on while a checkpoint is written, at most one at a time; an error is raised on all ranks at
    the end of a later step. Older checkpoints are removed only after a new one is durable, and only
    those that this run wrote; the newest, and the one that it resumed from, stay. A run begins by
    trying whether the folder can be written.

    Args:
        dirpath: folder or fsspec URL; ``<project_dir>/checkpoints`` where ``None``.
        every_n_steps: save every so many optimizer steps.
        every_n_epochs: save every so many epochs; 1 if no other interval is given.
        every_seconds: save when so much time has passed since the last save, by the clock of the
            main process: seconds, text such as ``"10 min"``, or a ``timedelta``.
        every: an interval with its unit instead: ``"100 steps"``, ``"2 epochs"``, ``"10 min"``, or
            ``"0.1 run"`` for each tenth of the run.
        keep_last: newest checkpoints to keep, 3 by default; ``None`` keeps all.
        monitor: a logged metric: at the end of an epoch in which it improved a checkpoint is saved,
            and the ``keep_best`` best are kept besides the newest.
        mode: ``"min"`` (default) or ``"max"``.
        keep_best: best checkpoints to keep, 1 by default.
        keep_every: also keep those whose step is a multiple of this; none if ``None``.
        keep: a policy of ``checkpoint_io`` in place of these numbers, such as
            ``keep_last(3) | keep_every(1000)``.
        async_save: write while training goes on, on by default. If False, training waits.
        when_busy: what a save does while the one before is still being written: ``"wait"`` (the
            default), or ``"skip"``. The finished run always waits.
        when_failed: what a save that could not be written does: ``"raise"`` (the default), or
            ``"warn"``, so that training goes on until the next one.
        on_exception: if an error ends the run of a single process, save what it has reached into
            ``exception-step-<global step>``; a run resumes from there only if it is told to, or
            there is nothing else. Off by default.
        max_shard_size: largest tensor file, such as ``"5GB"``.
        storage_options: for the filesystem behind the URL.

    Attributes:
        last_path: the newest checkpoint written by this process, once durable, or ``None``.
        best_path: the best one by ``monitor`` of the main process, once durable, or ``None``.

    Raises:
        ValueError: an interval or a number to keep is below 1 or given twice, or an unknown
            ``when_busy`` or ``when_failed``.
        TypeError: ``keep`` is no policy, or ``every`` no interval.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Checkpoint
        >>> saver = Checkpoint(tempfile.mkdtemp(), every="1 epoch")
        >>> accel = Accelerator(cpu=True, callbacks=[saver])
        >>> data = accel.prepare(torch.utils.data.DataLoader(range(4)))
        >>> with accel.run("demo") as run:
        ...     for epoch in run.epochs(2):
        ...         for batch in data:
        ...             pass
        >>> saver.last_path.endswith("step-00000000")
        True
    """

    runs_last = True
    collective = True

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        every_seconds: float | str | timedelta | None = None,
        every: str | timedelta | None = None,
        keep_last: int | None = 3,
        monitor: str | None = None,
        mode: str = "min",
        keep_best: int = 1,
        keep_every: int | None = None,
        keep: Keep | None = None,
        async_save: bool = True,
        when_busy: str = "wait",
        when_failed: str = "raise",
        on_exception: bool = False,
        max_shard_size: int | str = "5GB",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_when_busy(when_busy)
        if when_failed not in ("raise", "warn"):
            raise ValueError(f"when_failed={when_failed!r} is unknown; use 'raise' or 'warn'.")
        if keep is not None and (keep_last, keep_best, keep_every) != (3, 1, None):
            raise ValueError("keep says what stays: leave keep_last, keep_best, keep_every out.")
        self.dirpath = os.fspath(dirpath) if dirpath is not None else None
        self.schedule = Schedule(every_n_steps, every_n_epochs, every_seconds, every)
        if self.schedule.is_empty and monitor is None:
            self.schedule = Schedule(every_n_epochs=1)
        self.can_vote = self.schedule.needs_votes
        self.monitor = Monitor(monitor, mode) if monitor is not None else None
        self.retention = Retention(keep_last, keep_best, keep_every, self.monitor, keep)
        self.async_save = async_save
        self.when_busy = when_busy
        self.when_failed = when_failed
        self.saves_on_exception = on_exception
        self.max_shard_size = max_shard_size
        self.storage_options = storage_options
        self._folder: CheckpointFolder | None = None
        self._forget()

    def _forget(self) -> None:
        """What a new run begins with."""
        self.last_path: str | None = None
        self.best_path: str | None = None
        self._notes = SaveNotes(self.monitor)
        self._last_step: int | None = None  # at the end of the batch before

    @property
    def state_key(self) -> str:
        """``Checkpoint``, with the folder where one was given."""
        return "Checkpoint" if self.dirpath is None else f"Checkpoint:{self.dirpath}"

    def resume_root(self, run: TrainingRun) -> tuple[str, Mapping[str, Any] | None]:
        """Where ``accel.run`` looks for something to resume from."""
        return self._folder_url(run), self.storage_options

    def _folder_url(self, run: TrainingRun) -> str:
        return self.dirpath or run.accelerator._in_project("checkpoints")

    def _open(self, run: TrainingRun) -> CheckpointFolder:
        """The folder; kept, because it remembers the manifests that it has read."""
        url = self._folder_url(run)
        if self._folder is None or self._folder.url != url:
            self._folder = checkpointing.open_folder(url, self.storage_options)
        return self._folder

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Begin anew, unless ``load_state`` has told where the run stands; try the folder."""
        if run.begins_anew:
            self._forget()
        with shared_failure(f"trying {self._folder_url(run)}"):
            if run.is_global_zero:
                self._open(run).probe()

    # --- when ---------------------------------------------------------------------------------

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """From here on the clock counts."""
        self.schedule.restart_clock(run)

    def on_log(self, run: TrainingRun, model: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Note the monitored value; it scores the next checkpoint and no later one."""
        self._notes.read(metrics)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a step interval is over; ask all processes to, if the clock says so."""
        # A save that failed or was skipped waits for the next interval, not for the next batch.
        before, self._last_step = self._last_step, run.global_step
        stepped = run.global_step != before
        if stepped and self.schedule.step_is_due(run.global_step, self._notes.saved_step):
            self._save(run)
        elif self.schedule.clock_is_due(run):
            run.save_now(self._clock_reason)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Save if an epoch interval is over, or the metric improved."""
        if run.preempted:  # saved already, and there may be little time left
            return
        due = self.schedule.epoch_is_due(run.epochs_done)
        if self.monitor is not None and not due:
            # Processes may have logged different values; the main one's counts.
            due = collectives.broadcast_object(self._notes.improved)
        if due:
            self._save(run)

    def save_now(self, run: TrainingRun, reason: str) -> None:
        """Collective: save at this step boundary, if it is not saved yet; see ``run.save_now``.

        Args:
            run: the run.
            reason: whose wish it is; another Checkpoint's clock is no reason for this one.
        """
        others = (one for one in run.accelerator.loop.dispatch.savers if one is not self)
        if reason in [getattr(other, "_clock_reason", None) for other in others]:
            return
        if self._notes.saved_at != _place(run):
            self._save(run)

    def on_preempt(self, run: TrainingRun, model: Any, reason: str) -> None:
        """Save this place, and return once it is durable."""
        from checkpoint_io import CheckpointError

        try:
            run.accelerator.loop.saves.wait()
        except CheckpointError as error:  # on all processes; there is time for one more
            warnings.warn(f"the save before has failed: {error}", stacklevel=2)
        if self._notes.saved_at != _place(run):
            self._save(run, last=True)

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Save the finished run, unless its last state is saved; it is durable afterwards."""
        run.accelerator.loop.saves.wait()
        if self._notes.saved_at != _place(run) and not run.preempted:
            self._save(run, last=True)

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Save what can be saved without the other processes, if asked to."""
        if self.saves_on_exception:
            options = (self.max_shard_size, self.storage_options)
            save_after_error(run, self._open(run), exception, *options)

    @property
    def _clock_reason(self) -> str:
        return f"{self.state_key}, {self.schedule.clock}"

    # --- what ---------------------------------------------------------------------------------

    def _save(self, run: TrainingRun, *, last: bool = False) -> None:
        began = time.perf_counter()
        when_busy = "wait" if last or not self.async_save else self.when_busy
        self.schedule.restart_clock(run)
        # First, because the end of the save before changes what is noted here.
        if not run.accelerator.loop.saves.make_room(when_busy):
            return
        folder = self._open(run)
        if self.monitor is not None:  # each process may have logged its own; the main one's counts
            self._notes.fresh_score = collectives.broadcast_object(self._notes.fresh_score)
        before = self._notes.state_dict()
        # Now, because what the checkpoint says of this callback must hold after it was saved.
        metadata = self._notes.take(_place(run), folder.path(run.global_step))
        try:
            checkpointing.write(
                run.accelerator,
                folder,
                metadata=metadata,
                max_shard_size=self.max_shard_size,
                async_save=self.async_save and not last,
                began=began,
                then=Then(
                    saved=self._note_saved,
                    failed=partial(self._failed, before),
                    tidy=partial(self.retention.prune, folder, run.run_id, run.resumed_from)
                    if run.is_global_zero
                    else None,
                ),
            )
        except BaseException as error:
            if not self._failed(before, error):
                raise

    def _note_saved(self, path: str) -> None:
        """The checkpoint is durable."""
        self.last_path, self.best_path = path, self._notes.best_path

    def _failed(self, before: dict[str, Any], error: BaseException) -> bool:
        """Take back what was noted of a save; True if training goes on without it."""
        from checkpoint_io import CheckpointError, UnsupportedStateError

        self._notes.undo(before)
        # A state that cannot be saved now will not be saved later either.
        lasting = isinstance(error, UnsupportedStateError) or not isinstance(error, CheckpointError)
        if self.when_failed == "raise" or lasting:
            return False
        warnings.warn(f"training goes on without this checkpoint: {error}", stacklevel=2)
        return True

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was saved last, and the best score."""
        return self._notes.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place."""
        self._notes.load_state_dict(state_dict)
        self.best_path = self._notes.best_path


def _place(run: TrainingRun) -> Place:
    return run.global_step, run.epochs_done, run.epoch_open
