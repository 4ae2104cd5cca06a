"""Checkpoint: save checkpoints on a schedule, keep the newest and the best."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.callbacks.base import ResumableState, require_at_least
from accel_callbacks.callbacks.interval import Cadence, Interval
from accel_callbacks.callbacks.monitor import Monitor
from accel_callbacks.checkpoint.async_save import SaveCallbacks, check_when_busy, is_dispensable
from accel_callbacks.checkpoint.open import open_folder
from accel_callbacks.checkpoint.part import ResumeSource, reached
from accel_callbacks.checkpoint.project import path_in
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.logging import notice
from checkpoint_io.local_files import absolute, base_name, split_path
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import CheckpointFolder, CheckpointInfo

__all__ = [
    "Checkpoint",
    "Every",
    "Keep",
    "Position",
    "Retention",
    "SaveRecord",
    "Schedule",
    "is_exception_checkpoint",
]

_PREFIX = "exception-step-"
Keep = Callable[[Sequence["CheckpointInfo"]], Iterable["CheckpointInfo"]]
Position = tuple[int, int, bool]  # global step, epochs done, whether an epoch is open
Every = str | float | timedelta | Interval


class Checkpoint(ResumableState):
    """Save checkpoints into a folder on any store, and let a run resume from the newest.

    Checkpoints are named ``step-<global step>``. Step intervals are counted in optimizer steps
    and saved at the end of the loop's body; epoch intervals at the end of the epoch, after its
    validation. The finished run is saved too, and so is a preempted one. Training continues while a
    checkpoint is written, at most one at a time; a failed write is raised on all ranks at the end
    of a later step. Older checkpoints are removed only after a new one is durable, and only those
    that this run wrote; the newest, and the one that it resumed from, are kept. A run starts by
    checking that the folder is writable.

    Args:
        dirpath: folder or fsspec URL; ``<project_dir>/checkpoints`` if ``None``.
        every_n_steps: save every so many optimizer steps.
        every_n_epochs: save every so many epochs; 1 if no other interval is given.
        every_seconds: save when this time has passed since the last save, by the clock of the
            main process: seconds, text such as ``"10 min"``, or a ``timedelta``.
        every: an interval with its unit instead: ``"100 steps"``, ``"2 epochs"``, ``"10 min"``, or
            ``"0.1 run"`` for each tenth of the run.
        keep_last: newest checkpoints to keep, 3 by default; ``None`` keeps all.
        monitor: a logged metric: at the end of an epoch in which it improved a checkpoint is saved,
            and the ``keep_best`` best are kept in addition to the newest.
        mode: ``"min"`` (default) or ``"max"``; the default warns of a name such as accuracy.
        keep_best: best checkpoints to keep, 1 by default.
        keep_every: also keep those whose step is a multiple of this; none if ``None``.
        keep: a policy of ``checkpoint_io`` in place of these numbers, such as
            ``keep_last(3) | keep_every(1000)``.
        async_save: write while training continues, on by default. If False, training waits.
        when_busy: what to do if the previous save is still being written: ``"wait"`` (the
            default), or ``"skip"`` this one. The save of the finished run always waits.
        when_failed: what to do if a checkpoint could not be written: ``"raise"`` (the default), or
            ``"warn"`` and continue training until the next one. The loss of another rank is raised
            in either case.
        on_exception: if an error ends a run of a single process, save its state into
            ``exception-step-<global step>``; a run resumes from there only if its path is given,
            or if there is no other checkpoint. Off by default.
        memory_every_n_steps: also keep the newest state in host memory so often, under ``accel
            launch --max_restarts`` on Linux: a restart of that launch resumes from it if it is
            newer than the newest checkpoint. Each machine also holds the part of another one,
            which may be lost. None is kept by default.
        trainable_only: leave frozen parameters out, off by default: a resume takes those of the
            model that the script builds, and warns if they are others. Buffers, and parameters
            that were trained before they were frozen, are saved. Of a PEFT model with one adapter
            the checkpoint is also one that ``PeftModel.from_pretrained`` opens.
        max_shard_size: largest tensor file, such as ``"5GB"``.
        storage_options: for the filesystem behind the URL.

    Attributes:
        last_path: the newest checkpoint of the run in the folder, once durable; after a resume
            from elsewhere that checkpoint, until one is saved here; ``None`` before the first.
        best_path: the best one of the run by ``monitor`` that is there, once durable, or ``None``.
            Both are found anew after a resume, also if the folder was moved.

    Raises:
        ValueError: an interval or a number to keep is below 1 or given twice, ``keep`` is given
            together with numbers, or ``when_busy`` or ``when_failed`` is unknown.
        TypeError: ``keep`` is not a policy, or ``every`` not an interval.

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
    name_option = "dirpath"

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
        mode: str | None = None,
        keep_best: int = 1,
        keep_every: int | None = None,
        keep: Keep | None = None,
        async_save: bool = True,
        when_busy: str = "wait",
        when_failed: str = "raise",
        on_exception: bool = False,
        memory_every_n_steps: int | None = None,
        trainable_only: bool = False,
        max_shard_size: int | str = "5GB",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_when_busy(when_busy)
        require_at_least(1, memory_every_n_steps=memory_every_n_steps)
        if when_failed not in ("raise", "warn"):
            raise ValueError(f"when_failed={when_failed!r} is unknown; use 'raise' or 'warn'.")
        if keep is not None and (keep_last, keep_best, keep_every) != (3, 1, None):
            raise ValueError("keep replaces keep_last, keep_best and keep_every: leave them out.")
        self.dirpath = None if dirpath is None else absolute(dirpath)
        # As it was given: the state of this callback is the same wherever the script starts.
        self._key = "Checkpoint" if dirpath is None else f"Checkpoint:{os.fspath(dirpath)}"
        self.schedule = Schedule(every_n_steps, every_n_epochs, every_seconds, every)
        if self.schedule.is_empty and monitor is None:
            self.schedule = Schedule(every_n_epochs=1)
        # The main process measures a time or a part of the run, for all ranks.
        self.can_vote = bool(self.schedule.clock)
        self.monitor = Monitor(monitor, mode) if monitor is not None else None
        self.retention = Retention(keep_last, keep_best, keep_every, self.monitor, keep)
        self.async_save = async_save
        self.when_busy = when_busy
        self.when_failed = when_failed
        self.saves_on_exception = on_exception
        self.memory_every_n_steps = memory_every_n_steps
        self._memory_schedule = Schedule(memory_every_n_steps)
        self.trainable_only = trainable_only
        self.max_shard_size = max_shard_size
        self.storage_options = storage_options
        self._folder: CheckpointFolder | None = None
        self._memory: ResumeSource | None = None
        self._memory_of: TrainingRun | None = None  # the run for which that was decided
        self.preempted_in_memory = False  # and not in the store yet
        self.reset_state()

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        self.last_path: str | None = None
        self.best_path: str | None = None
        self._record = SaveRecord(self.monitor)
        self._last_step = 0  # at the end of the previous batch
        self._reserved = not self.async_save or self.trainable_only  # as then little is copied
        self._warned = False

    @property
    def state_key(self) -> str:
        """``Checkpoint``, or ``Checkpoint:<dirpath>`` if a folder was given."""
        return self._key

    def resume_root(self, run: TrainingRun) -> tuple[str, Mapping[str, Any] | None]:
        """Return the folder in which ``accel.run`` finds the newest checkpoint, and its options."""
        return self._folder_url(run), self.storage_options

    def _folder_url(self, run: TrainingRun) -> str:
        return self.dirpath or path_in(run.default_root_dir, "checkpoints")

    def _open(self, run: TrainingRun) -> CheckpointFolder:
        """Open the folder once, because it caches the manifests that it has read."""
        url = self._folder_url(run)
        if self._folder is None or self._folder.url != url:
            self._folder = open_folder(url, self.storage_options)
        return self._folder

    def resume_source(self, run: TrainingRun) -> ResumeSource | None:
        """Collective, once a run: return the snapshots in host memory, None if none are kept."""
        # Not once a process: another rank may be new, and this one not.
        if self.memory_every_n_steps is not None and self._memory_of is not run:
            # Imported here, because few runs keep any.
            from accel_callbacks.addons.resilience.memory_snapshots import snapshots_beside

            self._memory, self._memory_of = snapshots_beside(self._folder_url(run)), run
        return self._memory

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the state, unless ``load_state`` restored it, and probe the folder."""
        super().setup(run, model, stage)
        self.resume_source(run)
        with shared_failure(f"trying {self._folder_url(run)}"):
            if run.is_global_zero:
                self._open(run).probe()

    # --- when to save ------------------------------------------------------------------------

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Count steps and time from here."""
        self._last_step = run.global_step
        self.schedule.restart_clock(run)
        if self._memory is not None:
            self._memory.forget(but=run.resumed_from)

    def on_log(self, run: TrainingRun, model: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Read the monitored value, which scores the next checkpoint and no later one."""
        self._record.read(metrics)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a step interval ends here; request a save of all ranks if the time is up."""
        if not self._reserved and run.global_step > 0:  # from here on optimizers have a state
            self._reserved = True
            run.accelerator.loop.saves.reserve(run.accelerator.training_state.nbytes())
        # A save that failed or was skipped is not tried again with the next batch, but at the end
        # of the next interval. In join_uneven_inputs another rank may take no step any more.
        if run.in_lockstep:
            self._save_after_step(run)
        if self.schedule.clock_is_due(run):
            run.save_now(self._clock_reason)

    def _save_after_step(self, run: TrainingRun) -> None:
        """Save if a step interval has ended since the last batch, else to memory if its has."""
        step, before = run.global_step, self._last_step
        self._last_step = step
        if self.schedule.step_is_due(step, self._record.saved_step, before):
            self._save(run)
        elif self._memory is not None and self._memory_schedule.step_is_due(step, None, before):
            self._save_in_memory(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Save if an epoch interval ends here, or the metric improved."""
        if self.monitor is not None and self.monitor.is_misspelt(run.callback_metrics):
            self._warn_of_missing(run, self.monitor)  # of another name: it may come later
        if run.preempted:  # saved already, and there may be little time left
            return
        due = self.schedule.epoch_is_due(run.epochs_done)
        if self.monitor is not None and not due:
            # Ranks may have logged different values; that of the main process counts.
            due = collectives.broadcast_object(self._record.improved)
        if due:
            self._save(run)

    def save_now(self, run: TrainingRun, reason: str) -> None:
        """Save at this step boundary, if it is not saved yet; see ``run.save_now``. Collective.

        Args:
            run: the run.
            reason: of the request; that of another Checkpoint's clock is ignored.
        """
        others = [saver for saver in run.checkpoint_callbacks if saver is not self]
        if reason in [getattr(saver, "_clock_reason", None) for saver in others]:
            return
        if self._record.saved_at != _position(run):
            self._save(run)

    def on_preempt(self, run: TrainingRun, model: Any, reason: str) -> None:
        """Save this position, and return once it is durable.

        First in memory, if it is kept there: the seconds that are left may be too few for a store.
        """
        _wait_for_pending_save(run)
        if self._record.saved_at != _position(run):
            if self._memory is not None and self._save_in_memory(run, last=True):
                url = self._open(run).path(run.global_step)
                notice(f"the state is in memory for a restart of this launch; now to {url}")
                self.preempted_in_memory = True
            self._save(run, last=True)
            self.preempted_in_memory = False

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Save the finished run, unless it is saved already, and wait until that is durable."""
        if self.monitor is not None and run.epochs_done:
            self._warn_of_missing(run, self.monitor)
        run.accelerator.loop.saves.wait()
        if self._record.saved_at != _position(run) and not run.preempted:
            self._save(run, last=True)
        saved = self._record.saved_at == _position(run)
        if self._memory is not None and saved:
            self._memory.forget()

    def on_fit_end(self, run: TrainingRun, model: Any) -> None:
        """Save a run that was resumed after its last epoch, and before it was saved as finished."""
        # Nothing is left to train then, so no hook of training comes.
        finished = run.max_epochs is not None and run.epochs_done >= run.max_epochs
        if finished and run.resumed_from is not None:
            self.on_train_end(run, model)

    def _warn_of_missing(self, run: TrainingRun, monitor: Monitor) -> None:
        """Warn once of a metric that scores no checkpoint, as it was never logged."""
        unlogged = monitor.name not in run.callback_metrics and self._record.best_score is None
        if unlogged and not self._warned and run.is_global_zero:
            self._warned = True
            text = monitor.missing_text("Checkpoint", run.callback_metrics)
            warn(f"{text} Without it there is no best checkpoint: log it, or change monitor=.")

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Save the state of a run of one process, with ``on_exception=True``."""
        if not self.saves_on_exception:
            return
        if collectives.world_size() > 1:
            if run.is_global_zero:
                notice("no checkpoint of the error: saving takes all ranks, and some may be gone")
            return
        if _is_inside_step(exception):
            notice("no checkpoint of the error: it was raised in the middle of an optimizer step")
            return
        try:
            _wait_for_pending_save(run)
            with _inside_epoch(run):
                path = run.accelerator.checkpointer.write(
                    self._open(run),
                    name=f"{_PREFIX}{run.global_step:08d}",
                    # Not the newest of the folder: `resume=True` prefers any other.
                    generation=0,
                    metadata={"exception": f"{type(exception).__name__}: {exception}"[:1000]},
                    **self._write_options,
                )
        except Exception as problem:  # what ends the run is to be seen, and not this
            text = f"{type(problem).__name__}: {problem}"
            warn(f"the state at the error could not be saved: {text}")
        else:
            notice(f"saved the state at the error; resume={path!r} continues from there")

    @property
    def _write_options(self) -> dict[str, Any]:
        return {
            "storage_options": self.storage_options,
            "max_shard_size": self.max_shard_size,
            "trainable_only": self.trainable_only,
        }

    @property
    def _clock_reason(self) -> str:
        return f"{self.state_key}, {self.schedule.clock}"

    # --- saving -----------------------------------------------------------------------------

    def _save(self, run: TrainingRun, *, last: bool = False) -> None:
        began = time.perf_counter()
        when_busy = "wait" if last or not self.async_save else self.when_busy
        self.schedule.restart_clock(run)
        # First, because the end of the previous save changes the record.
        if not run.accelerator.loop.saves.make_room(when_busy):
            return
        folder = self._open(run)
        if self.monitor is not None:  # each rank may have logged its own; the main process's counts
            self._record.fresh_score = collectives.broadcast_object(self._record.fresh_score)
        before = self._record.state_dict()
        # Before the write, because the checkpoint contains this callback's state as of after it.
        metadata = self._record.add_save(_position(run), folder.path(run.global_step))
        try:
            run.accelerator.checkpointer.write(
                folder,
                metadata=metadata,
                async_save=self.async_save and not last,
                began=began,
                callbacks=SaveCallbacks(
                    on_saved=self._on_saved,
                    on_failed=partial(self._on_failed, before),
                    cleanup=partial(self.retention.prune, folder, run.run_id, run.resumed_from)
                    if run.is_global_zero
                    else None,
                ),
                **self._write_options,
            )
        except BaseException as error:
            if not self._on_failed(before, error):
                raise

    def _save_in_memory(self, run: TrainingRun, *, last: bool = False) -> bool:
        """Take a snapshot; return whether one was taken, and with ``last`` is complete."""
        assert self._memory is not None
        return self._memory.offer(
            run,
            async_save=self.async_save and not last,
            max_shard_size=self.max_shard_size,
            trainable_only=self.trainable_only,
        )

    def _on_saved(self, path: str) -> None:
        """Publish the paths once the checkpoint is durable."""
        self.last_path, self.best_path = path, self._record.best_path

    def _on_failed(self, before: dict[str, Any], error: BaseException) -> bool:
        """Undo the record of a failed save; returns whether training continues without it."""
        self._record.undo(before)
        if self.when_failed == "raise" or not is_dispensable(error):
            return False
        warn(f"training continues without this checkpoint: {error}")
        return True

    # --- finding ------------------------------------------------------------------------------

    def resumed(self, run: TrainingRun) -> None:
        """Collective: find the checkpoints of the resumed run where they are now.

        Args:
            run: restored, and so is the state of this callback.
        """
        relocated: tuple[str | None, str | None, float | None] = None, None, None
        with shared_failure(f"looking into {self._folder_url(run)}"):
            if run.is_global_zero:
                relocated = self._locate_checkpoints(run)
        self.last_path, best, score = collectives.broadcast_object(relocated)
        self.best_path = self._record.best_path = best
        self._record.best_score = score

    def _locate_checkpoints(self, run: TrainingRun) -> tuple[str | None, str | None, float | None]:
        """Return the last and the best path, and the best score."""
        folder, resumed = self._open(run), run.resumed_from
        if resumed is not None and _is_in_memory(run, resumed):  # of which no later run knows
            resumed = None
        # A rewound run: the later checkpoints in the folder are not of its past.
        infos = [
            info
            for info in _valid_in(folder)
            if info.manifest.metadata.get("run_id") == run.run_id
            and reached(info.manifest.metadata) <= (run.global_step, run.epochs_done)
        ]
        names = {info.name: info.path for info in infos}
        normal = [info.path for info in infos if not is_exception_checkpoint(info.name)]
        last = normal[-1] if normal else resumed
        if resumed is not None and base_name(resumed) in names:
            last = names[base_name(resumed)]
        if (best := self._record.best_path) is not None:
            name = base_name(best)
            beside = None if resumed is None else split_path(resumed)[0] + name
            for path in dict.fromkeys((names.get(name), beside, best)):
                if path is not None and self._is_best(path, run.run_id):
                    return last, path, self._record.best_score
        return last, *self._best_of(infos)

    def _is_best(self, path: str, run_id: str) -> bool:
        """Return whether the checkpoint of the best score is at this path, and whole."""
        from checkpoint_io import open_checkpoint

        try:
            reader = open_checkpoint(path, rank=0, storage_options=self.storage_options)
            reader.check()
        except FileNotFoundError:
            return False  # the path may be of another machine
        except Exception as error:  # each store's driver has its own
            warn(
                f"{path}, noted as the best checkpoint of the run, cannot be read ({error}): the "
                "best of those that can takes its place. If it is whole, make it readable and "
                "resume again."
            )
            return False
        metadata = reader.manifest.metadata
        best = self._record.best_score
        return metadata.get("run_id") == run_id and _score_in(metadata) == best

    def _best_of(self, infos: Sequence[CheckpointInfo]) -> tuple[str | None, float | None]:
        """Return the best of some checkpoints, oldest first, and its score."""
        from checkpoint_io import keep_best

        if self.monitor is None:
            return None, None
        for info in keep_best(1, self.monitor.name, self.monitor.mode)(infos):
            return info.path, _score_in(info.manifest.metadata)
        return None, None

    def find_saved(self, run: TrainingRun, which: str) -> tuple[str | None, Position]:
        """Collective: return the path of the best or the last checkpoint, and its position.

        Before anything was trained or loaded, that of the newest run in the folder.

        Args:
            run: the run.
            which: ``"best"`` or ``"last"``.

        Raises:
            FileNotFoundError: it was removed.
        """
        path = self.best_path if which == "best" else self.last_path
        at = self._record.saved_at or (0, 0, False)
        with shared_failure(f"looking into {self._folder_url(run)}"):
            if run.is_global_zero and path is not None:
                self._require(path, which)
            elif run.is_global_zero and run.starts_fresh:
                infos = _valid_in(self._open(run))
                infos = [info for info in infos if not is_exception_checkpoint(info.name)] or infos
                newest = infos[-1].manifest.metadata if infos else {}
                run_id = newest.get("run_id")
                infos_of_run = [i for i in infos if i.manifest.metadata.get("run_id") == run_id]
                last = infos_of_run[-1].path if infos_of_run else None
                path = self._best_of(infos_of_run)[0] if which == "best" else last
                at = (int(newest.get("step", 0)), int(newest.get("epoch", 0)), False)
        path, at = collectives.broadcast_object((path, at))
        return path, (at[0], at[1], at[2])

    def _require(self, path: str, which: str) -> None:
        """Raise FileNotFoundError if a checkpoint of this run was removed."""
        from checkpoint_io import CheckpointNotFoundError, read_manifest

        try:
            read_manifest(path, tensors=False, storage_options=self.storage_options)
        except CheckpointNotFoundError as error:
            name = self.monitor.name if self.monitor is not None else None
            policy = f"keep_best(1, {name!r})" if which == "best" else "keep_last(1)"
            raise FileNotFoundError(
                f"the {which} checkpoint, {path}, was removed since it was saved: let "
                f"Checkpoint(keep=...) keep it with `| {policy}`, or give the path of another one."
            ) from error

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position and score of the last save, and the best score."""
        return self._record.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place."""
        self._record.load_state_dict(state_dict)
        self.best_path = self._record.best_path


def _valid_in(folder: CheckpointFolder) -> list[CheckpointInfo]:
    """Return the valid checkpoints of a folder, oldest first, without a word about the others."""
    infos = [entry.info for entry in folder.survey() if entry.status == "valid"]
    return sorted(infos, key=lambda info: (info.manifest.generation, info.manifest.created))


def _score_in(metadata: Mapping[str, Any]) -> float | None:
    """Return the score in the metadata of a checkpoint, None without one."""
    score = metadata.get("score")
    return score.get("value") if isinstance(score, dict) else None


def _is_in_memory(run: TrainingRun, path: str) -> bool:
    """Return whether a path is that of a snapshot of one of the run's callbacks."""
    sources = (getattr(saver, "_memory", None) for saver in run.checkpoint_callbacks)
    return any(source.holds(path) for source in sources if source is not None)


def _position(run: TrainingRun) -> Position:
    return run.global_step, run.epochs_done, run.epoch_open


class Schedule:
    """The intervals at which a Checkpoint saves.

    Args:
        every_n_steps: optimizer steps.
        every_n_epochs: epochs.
        every_seconds: a time.
        every: one of them, or a part of the run, as text.

    Raises:
        ValueError: an interval is empty, or given twice.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        every_seconds: Every | None = None,
        every: Every | None = None,
    ) -> None:
        require_at_least(1, every_n_steps=every_n_steps, every_n_epochs=every_n_epochs)
        self._steps, self._epochs = every_n_steps, every_n_epochs
        self._clock: Cadence | None = None
        if every_seconds is not None:
            self._clock = Cadence(Interval.seconds(every_seconds, "every_seconds"))
        if every is not None:
            self._set_from(every)

    def _set_from(self, every: Every) -> None:
        """Set the interval that ``every`` stands for."""
        if isinstance(every, (int, float)):
            raise ValueError(f"every={every!r} has no unit: write '{every} steps' or '{every} s'.")
        interval = Interval.parse(every)
        name = {"steps": "every_n_steps", "epochs": "every_n_epochs"}.get(interval.unit)
        others = {"every_n_steps": self._steps, "every_n_epochs": self._epochs}
        if (self._clock if name is None else others[name]) is not None:
            raise ValueError(f"every={every!r} and {name or 'every_seconds'}: give one of the two.")
        if interval.unit == "steps":
            self._steps = int(interval.amount)
        elif interval.unit == "epochs":
            self._epochs = int(interval.amount)
        else:
            self._clock = Cadence(interval)

    @property
    def is_empty(self) -> bool:
        """True if no interval was given."""
        return self._steps is None and self._epochs is None and self._clock is None

    @property
    def clock(self) -> str:
        """The time interval or part of the run as text; empty if there is none."""
        return "" if self._clock is None else f"every {self._clock.interval}"

    def step_is_due(
        self, step: int, saved_step: int | None = None, before: int | None = None
    ) -> bool:
        """Return whether a step interval ends at this step, which is not saved yet.

        Args:
            step: the global step.
            saved_step: of the last save.
            before: the step of the last call, if a batch may take several; the one before if
                ``None``.
        """
        if self._steps is None or step == saved_step:
            return False
        return step // self._steps > (step - 1 if before is None else before) // self._steps

    def epoch_is_due(self, epochs_done: int) -> bool:
        """Return whether an epoch interval ends after this many epochs."""
        return self._epochs is not None and epochs_done % self._epochs == 0

    def clock_is_due(self, run: TrainingRun) -> bool:
        """Return whether the time interval has passed; always False off the main process."""
        return self._clock is not None and run.is_global_zero and self._clock.is_due(run)

    def restart_clock(self, run: TrainingRun) -> None:
        """Count the time from here."""
        if self._clock is not None:
            self._clock.start(run)


class Retention:
    """The checkpoints to keep: a number of them, or those that a policy chooses.

    Args:
        keep_last: newest ones to keep; ``None`` keeps all.
        keep_best: best ones to keep, if there is a monitor.
        keep_every: keep multiples of this step as well.
        monitor: defines which are best.
        keep: a policy of ``checkpoint_io``, instead of the numbers.

    Raises:
        ValueError: a number is below 1.
        TypeError: ``keep`` is not a policy.
    """

    def __init__(
        self,
        keep_last: int | None = None,
        keep_best: int = 1,
        keep_every: int | None = None,
        monitor: Monitor | None = None,
        keep: Keep | None = None,
    ) -> None:
        require_at_least(1, keep_last=keep_last, keep_best=keep_best, keep_every=keep_every)
        if keep is not None and not callable(keep):
            raise TypeError(
                f"keep={keep!r} is not a policy: write keep_last(3) | keep_every(1000)."
            )
        self._keep = keep
        self._last, self._best, self._every = keep_last, keep_best, keep_every
        self._monitor = monitor

    @property
    def keeps_all(self) -> bool:
        """True if no checkpoint is ever removed."""
        return self._keep is None and self._last is None

    def __call__(self, infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return the checkpoints to keep; of those saved on an exception, always the newest."""
        normal = [info for info in infos if not is_exception_checkpoint(info.name)]
        on_exception = [info for info in infos if is_exception_checkpoint(info.name)]
        return [*self._policy()(normal), *on_exception[-1:]]

    def _policy(self) -> Keep:
        from checkpoint_io import any_of, keep_best, keep_every, keep_last

        if self._keep is not None:
            return self._keep
        if self._last is None:
            return lambda infos: infos
        policies = [keep_last(self._last)]
        if self._every is not None:
            policies.append(keep_every(self._every))
        if self._monitor is not None:
            policies.append(keep_best(self._best, self._monitor.name, self._monitor.mode))
        return any_of(*policies)

    def prune(self, folder: CheckpointFolder, run_id: str, resumed_from: str | None) -> None:
        """Remove the other checkpoints of this run, except the one that it resumed from."""
        if self.keeps_all:
            return
        protected = () if resumed_from is None else (resumed_from,)
        try:
            folder.prune(self, run_id=run_id, protect=protected, missing_ok=True)
        except Exception as error:  # each storage backend raises its own errors
            # The new checkpoint is durable; old ones that stay only take up space.
            problem = f"{type(error).__name__}: {error}"
            warn(f"older checkpoints in {folder.url} were not removed: {problem}")


class SaveRecord:
    """The position of the last save, and the latest, saved and best score.

    Args:
        monitor: the metric that scores checkpoints, if there is one.

    Attributes:
        saved_at: the position of the last save.
        fresh_score: logged since the last save; it scores the next checkpoint and no later one.
        saved_score: of the last save.
        best_score: of all saves.
        best_path: of the best save, durable or still being written.
    """

    def __init__(self, monitor: Monitor | None = None) -> None:
        self.monitor = monitor
        self.saved_at: Position | None = None
        self._fresh: Any = None  # a tensor stays on its device until the score is needed
        self.saved_score: float | None = None
        self.best_score: float | None = None
        self.best_path: str | None = None

    def read(self, metrics: Mapping[str, Any]) -> None:
        """Take the monitored value from logged metrics, if it is among them."""
        if self.monitor is not None:
            value = metrics.get(self.monitor.name)
            self._fresh = self._fresh if value is None else value

    @property
    def fresh_score(self) -> float | None:
        """The score logged since the last save; reading it waits for the device."""
        if self._fresh is not None:
            self._fresh = float(self._fresh)
        return self._fresh

    @fresh_score.setter
    def fresh_score(self, value: float | None) -> None:
        self._fresh = value

    @property
    def improved(self) -> bool:
        """True if the fresh score is better than those of all saves."""
        if self.monitor is None or self.fresh_score is None:
            return False
        return self.monitor.is_better(self.fresh_score, than=self.best_score)

    @property
    def saved_step(self) -> int | None:
        """The step of the last save."""
        return None if self.saved_at is None else self.saved_at[0]

    def add_save(self, position: Position, path: str) -> dict[str, Any]:
        """Record a save of this position; returns the score for the metadata of its manifest."""
        score = self._score_at(position[0])
        if self.improved:
            self.best_score, self.best_path = self.fresh_score, path
        self.fresh_score, self.saved_score, self.saved_at = None, score, position
        if score is None or self.monitor is None:
            return {}
        return {"score": {"monitor": self.monitor.name, "value": score}}

    def undo(self, before: dict[str, Any]) -> None:
        """Restore the state from before a failed save, but keep a score logged since."""
        fresh = self.fresh_score
        self.load_state_dict(before)
        if fresh is not None:
            self.fresh_score = fresh

    def _score_at(self, step: int) -> float | None:
        """Return the fresh score, or the better of two if this step is saved again."""
        fresh, earlier = self.fresh_score, self.saved_score
        if self.monitor is None or earlier is None or step != self.saved_step:
            return fresh
        better = fresh is not None and self.monitor.is_better(fresh, than=earlier)
        return fresh if better else earlier

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes but ``monitor``."""
        names = ("saved_at", "fresh_score", "saved_score", "best_score", "best_path")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore in place."""
        saved_at = state_dict["saved_at"]
        self.saved_at = None if saved_at is None else (saved_at[0], saved_at[1], saved_at[2])
        self.fresh_score = state_dict["fresh_score"]
        self.saved_score = state_dict["saved_score"]
        self.best_score = state_dict["best_score"]
        self.best_path = state_dict["best_path"]


def is_exception_checkpoint(name: str) -> bool:
    """Return whether a checkpoint's name is that of one saved on an exception."""
    return name.startswith(_PREFIX)


def _wait_for_pending_save(run: TrainingRun) -> None:
    """Wait for a save in progress; if it fails, warn, because this save is needed even more."""
    from checkpoint_io import CheckpointError

    try:
        run.accelerator.loop.saves.wait()
    except CheckpointError as error:  # raised on all ranks, so all of them can save once more
        warn(f"the previous save failed: {error}")


@contextmanager
def _inside_epoch(run: TrainingRun) -> Iterator[None]:
    """Reopen the pass over the data, so that a resume continues inside the epoch."""
    # The exception has closed the loader's generator, which ended the pass as `break` does.
    loop = run.accelerator.loop
    loader, active = loop.train_loader, loop.position.active
    trained = loop.step.worked and run.batch_idx + 1 >= run.num_training_batches
    if loader is None or loader in active or trained or not run.epoch_open:
        yield
        return
    before = loader.finished, loader.done
    loader.finished = loader.done = False
    active.append(loader)
    try:
        yield
    finally:
        active.remove(loader)
        loader.finished, loader.done = before


def _is_inside_step(error: BaseException) -> bool:
    """Return whether it was raised inside ``optimizer.step``, with only some weights updated."""
    from accel_callbacks.optimizer import AcceleratedOptimizer

    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(owner, torch.optim.Optimizer) and not isinstance(owner, AcceleratedOptimizer):
            return True
        trace = trace.tb_next
    return False
