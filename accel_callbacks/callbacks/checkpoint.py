"""Save the whole training state at intervals, keep the newest and the best, find the newest."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_callbacks import checkpointing, collectives
from accel_callbacks.background_saves import Then, check_when_busy
from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.monitor import Monitor
from accel_callbacks.failures import shared_failure

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun
    from checkpoint_io import CheckpointFolder

__all__ = ["Checkpoint"]


class Checkpoint(Callback):
    """Saves checkpoints into a folder on any store, and lets a run resume from the newest.

    Checkpoints are named ``step-<global step>``. Step intervals are counted in optimizer steps
    and saved at the end of the loop's body; epoch intervals at the end of the epoch, after its
    validation. The finished run is saved too. Training goes on while a checkpoint is written, at
    most one at a time; an error is raised on all processes at the end of a later step. Older
    checkpoints are removed only after a new one is durable, and only those that this run wrote;
    the one that it resumed from stays. A run begins by trying whether the folder can be written.

    Args:
        dirpath: folder or fsspec URL; ``<project_dir>/checkpoints`` where ``None``.
        every_n_steps: save every so many optimizer steps.
        every_n_epochs: save every so many epochs; 1 if no other interval is given.
        keep_last: newest checkpoints to keep, 3 by default; ``None`` keeps all.
        monitor: a logged metric: at the end of an epoch in which it improved a checkpoint is saved,
            and the ``keep_best`` best are kept besides the newest.
        mode: ``"min"`` (default) or ``"max"``.
        keep_best: best checkpoints to keep, 1 by default.
        keep_every: also keep those whose step is a multiple of this; none if ``None``.
        async_save: write while training goes on, on by default. If False, training waits.
        when_busy: what a save does while the one before is still being written: ``"wait"`` (the
            default), or ``"skip"``. The finished run always waits.
        when_failed: what a save that could not be written does: ``"raise"`` (the default), or
            ``"warn"``, so that training goes on until the next one.
        max_shard_size: largest tensor file, such as ``"5GB"``.
        storage_options: for the filesystem behind the URL.

    Attributes:
        last_path: the newest checkpoint written by this process, once durable, or ``None``.
        best_path: the best one by ``monitor``, once durable, or ``None``.

    Raises:
        ValueError: an interval or a number to keep is below 1, or an unknown ``when_busy`` or
            ``when_failed``.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Checkpoint
        >>> saver = Checkpoint(tempfile.mkdtemp(), every_n_epochs=1)
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

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        keep_last: int | None = 3,
        monitor: str | None = None,
        mode: str = "min",
        keep_best: int = 1,
        keep_every: int | None = None,
        async_save: bool = True,
        when_busy: str = "wait",
        when_failed: str = "raise",
        max_shard_size: int | str = "5GB",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        given = {
            "every_n_steps": every_n_steps,
            "every_n_epochs": every_n_epochs,
            "keep_last": keep_last,
            "keep_best": keep_best,
            "keep_every": keep_every,
        }
        for name, value in given.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        check_when_busy(when_busy)
        if when_failed not in ("raise", "warn"):
            raise ValueError(f"when_failed={when_failed!r} is unknown; use 'raise' or 'warn'.")
        self.dirpath = os.fspath(dirpath) if dirpath is not None else None
        self.every_n_steps = every_n_steps
        no_interval = every_n_steps is None and every_n_epochs is None and monitor is None
        self.every_n_epochs = 1 if no_interval else every_n_epochs
        self.keep_last = keep_last
        self.monitor = Monitor(monitor, mode) if monitor is not None else None
        self.keep_best = keep_best
        self.keep_every = keep_every
        self.async_save = async_save
        self.when_busy = when_busy
        self.when_failed = when_failed
        self.max_shard_size = max_shard_size
        self.storage_options = storage_options
        self._folder: CheckpointFolder | None = None
        self._forget()

    def _forget(self) -> None:
        """What a new run begins with."""
        self.last_path: str | None = None
        self.best_path: str | None = None
        self._saved_at: tuple[int, int, bool] | None = None
        self._fresh_score: float | None = None
        self._saved_score: float | None = None
        self._best_score: float | None = None
        self._best: str | None = None  # durable or on its way

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
        if run.resumed_from is None:
            self._forget()
        with shared_failure(f"trying {self._folder_url(run)}"):
            if run.is_global_zero:
                self._open(run).probe()

    # --- when ---------------------------------------------------------------------------------

    def on_log(self, run: TrainingRun, model: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Note the monitored value; it scores the next checkpoint and no later one."""
        if self.monitor is not None:
            value = self.monitor.read(metrics)
            self._fresh_score = self._fresh_score if value is None else value

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a step interval is over."""
        step, every = run.global_step, self.every_n_steps
        if every and step > 0 and step % every == 0 and step != self._saved_step:
            self._save(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Save if an epoch interval is over, or the metric improved."""
        due = self.every_n_epochs is not None and run.epochs_done % self.every_n_epochs == 0
        if self.monitor is not None and not due:
            # Processes may have logged different values; the main one's counts.
            due = collectives.broadcast_object(self._improved())
        if due:
            self._save(run)

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Save the finished run, unless its last state is saved; it is durable afterwards."""
        run.accelerator.loop.saves.wait()
        if self._saved_at != self._place(run):
            self._save(run, last=True)

    def _improved(self) -> bool:
        score = self._fresh_score
        if self.monitor is None or score is None:
            return False
        return self.monitor.is_better(score, than=self._best_score)

    def _place(self, run: TrainingRun) -> tuple[int, int, bool]:
        return run.global_step, run.epochs_done, run.epoch_open

    @property
    def _saved_step(self) -> int | None:
        return None if self._saved_at is None else self._saved_at[0]

    # --- what ---------------------------------------------------------------------------------

    def _save(self, run: TrainingRun, *, last: bool = False) -> None:
        when_busy = "wait" if last or not self.async_save else self.when_busy
        # First, because the end of the save before changes what is noted here.
        if not run.accelerator.loop.saves.make_room(when_busy):
            return
        folder = self._open(run)
        metadata: dict[str, Any] = {}
        score = self._score_of(run)
        if score is not None and self.monitor is not None:
            metadata["score"] = {"monitor": self.monitor.name, "value": score}
        before = self.state_dict()
        if self._improved():
            self._best_score, self._best = self._fresh_score, folder.path(run.global_step)
        # Set now, because what the checkpoint says of this callback must hold after it was saved.
        self._fresh_score, self._saved_score = None, score
        self._saved_at = self._place(run)
        try:
            checkpointing.write(
                run.accelerator,
                folder,
                metadata=metadata,
                max_shard_size=self.max_shard_size,
                async_save=self.async_save and not last,
                then=Then(
                    saved=self._note_saved,
                    failed=partial(self._failed, before),
                    tidy=partial(self._prune, folder, run.run_id, run.resumed_from)
                    if run.is_global_zero
                    else None,
                ),
            )
        except BaseException as error:
            if not self._failed(before, error):
                raise

    def _note_saved(self, path: str) -> None:
        """The checkpoint is durable."""
        self.last_path, self.best_path = path, self._best

    def _failed(self, before: dict[str, Any], error: BaseException) -> bool:
        """Take back what was noted of a save; True if training goes on without it."""
        from checkpoint_io import CheckpointError, UnsupportedStateError

        fresh, best_path = self._fresh_score, self.best_path
        self.load_state_dict(before)
        self.best_path = best_path
        if fresh is not None:
            self._fresh_score = fresh
        # A state that cannot be saved now will not be saved later either.
        lasting = isinstance(error, UnsupportedStateError) or not isinstance(error, CheckpointError)
        if self.when_failed == "raise" or lasting:
            return False
        warnings.warn(f"training goes on without this checkpoint: {error}", stacklevel=2)
        return True

    def _score_of(self, run: TrainingRun) -> float | None:
        """The fresh score; where a step is saved again, the better one of its scores."""
        fresh, earlier = self._fresh_score, self._saved_score
        if self.monitor is None or earlier is None or run.global_step != self._saved_step:
            return fresh
        better = fresh is not None and self.monitor.is_better(fresh, than=earlier)
        return fresh if better else earlier

    def _prune(self, folder: CheckpointFolder, run_id: str, resumed_from: str | None) -> None:
        """Remove what is neither among the newest nor among the best of this run."""
        from checkpoint_io import any_of, keep_best, keep_every, keep_last

        if self.keep_last is None:
            return
        policies = [keep_last(self.keep_last)]
        if self.keep_every is not None:
            policies.append(keep_every(self.keep_every))
        if self.monitor is not None:
            policies.append(keep_best(self.keep_best, self.monitor.name, self.monitor.mode))
        protected = () if resumed_from is None else (resumed_from,)
        try:
            folder.prune(any_of(*policies), run_id=run_id, protect=protected)
        except Exception as error:  # each store's driver has errors of its own
            # The new checkpoint is safe; old ones that stay only take up room.
            problem = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"older checkpoints in {folder.url} were not removed: {problem}", stacklevel=2
            )

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was saved last, and the best score."""
        return {
            "saved_at": self._saved_at,
            "fresh_score": self._fresh_score,
            "saved_score": self._saved_score,
            "best_score": self._best_score,
            "best_path": self._best,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place."""
        saved_at = state_dict["saved_at"]
        self._saved_at = None if saved_at is None else tuple(saved_at)
        self._fresh_score = state_dict["fresh_score"]
        self._saved_score = state_dict["saved_score"]
        self._best_score = state_dict["best_score"]
        self._best = self.best_path = state_dict["best_path"]
