"""Checkpoint: when to save, what to keep, what it remembers."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks.callbacks.interval import Cadence, Interval
from accel_callbacks.callbacks.monitor import Monitor
from accel_callbacks.callbacks.on_exception_checkpoint import is_after_error, save_after_error
from accel_callbacks.callbacks.resumable_state import ResumableState
from accel_callbacks.checkpoint import training_state
from accel_callbacks.checkpoint.async_save import Then, check_when_busy
from accel_callbacks.distributed.failures import shared_failure

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import CheckpointFolder, CheckpointInfo

__all__ = ["Checkpoint", "Every", "Keep", "Place", "Retention", "SaveNotes", "Schedule"]

Keep = Callable[[Sequence["CheckpointInfo"]], Iterable["CheckpointInfo"]]
Place = tuple[int, int, bool]  # steps, epochs done, whether an epoch is open
Every = str | float | timedelta | Interval


class Retention:
    """What a Checkpoint keeps: so many, or what a policy picks.

    Args:
        keep_last: newest ones to keep; ``None`` keeps all.
        keep_best: best ones to keep, where there is a monitor.
        keep_every: keep multiples of this step as well.
        monitor: what best means.
        keep: a policy of ``checkpoint_io``, instead of the numbers.

    Raises:
        ValueError: a number below 1, or a policy and numbers.
        TypeError: ``keep`` is no policy.

    Example:
        >>> from accel_callbacks.callbacks.checkpoint import Retention
        >>> Retention(keep_last=3, keep_best=1)([])
        []
    """

    def __init__(
        self,
        keep_last: int | None = None,
        keep_best: int = 1,
        keep_every: int | None = None,
        monitor: Monitor | None = None,
        keep: Keep | None = None,
    ) -> None:
        numbers = {"keep_last": keep_last, "keep_best": keep_best, "keep_every": keep_every}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if keep is not None and not callable(keep):
            raise TypeError(f"keep={keep!r} is no policy: write keep_last(3) | keep_every(1000).")
        self._keep = keep
        self._last, self._best, self._every = keep_last, keep_best, keep_every
        self._monitor = monitor

    @property
    def keeps_all(self) -> bool:
        """Nothing is ever removed."""
        return self._keep is None and self._last is None

    def __call__(self, infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Those to keep; of what was saved after an error, always the newest."""
        normal = [info for info in infos if not is_after_error(info.name)]
        after_errors = [info for info in infos if is_after_error(info.name)]
        return [*self._policy()(normal), *after_errors[-1:]]

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
        """Remove what is not to be kept of this run; never the one that it resumed from."""
        if self.keeps_all:
            return
        protected = () if resumed_from is None else (resumed_from,)
        try:
            folder.prune(self, run_id=run_id, protect=protected)
        except Exception as error:  # each store's driver has errors of its own
            # The new checkpoint is safe; old ones that stay only take up room.
            problem = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"older checkpoints in {folder.url} were not removed: {problem}", stacklevel=2
            )


class SaveNotes:
    """The place of the last save, and the monitored values: fresh, saved, best.

    Args:
        monitor: the metric that scores checkpoints, if there is one.

    Attributes:
        saved_at: steps, epochs done and whether an epoch was open at the last save.
        fresh_score: logged since the last save; it scores the next checkpoint and no later one.
        saved_score: of the last save.
        best_score: of all saves.
        best_path: of the best save, durable or on its way.

    Example:
        >>> from accel_callbacks.callbacks.checkpoint import SaveNotes
        >>> from accel_callbacks.callbacks.monitor import Monitor
        >>> notes = SaveNotes(Monitor("loss"))
        >>> notes.read({"loss": 0.5})
        >>> notes.improved
        True
        >>> notes.take((100, 1, False), "runs/step-00000100")
        {'score': {'monitor': 'loss', 'value': 0.5}}
    """

    def __init__(self, monitor: Monitor | None = None) -> None:
        self.monitor = monitor
        self.saved_at: Place | None = None
        self._fresh: Any = None  # a tensor stays on its device until the score is needed
        self.saved_score: float | None = None
        self.best_score: float | None = None
        self.best_path: str | None = None

    def read(self, metrics: Mapping[str, Any]) -> None:
        """Note the monitored value, if it was logged."""
        if self.monitor is not None:
            value = metrics.get(self.monitor.name)
            self._fresh = self._fresh if value is None else value

    @property
    def fresh_score(self) -> float | None:
        """Logged since the last save; reading it waits for the device."""
        if self._fresh is not None:
            self._fresh = float(self._fresh)
        return self._fresh

    @fresh_score.setter
    def fresh_score(self, value: float | None) -> None:
        self._fresh = value

    @property
    def improved(self) -> bool:
        """Whether the fresh value is better than all that was saved."""
        if self.monitor is None or self.fresh_score is None:
            return False
        return self.monitor.is_better(self.fresh_score, than=self.best_score)

    @property
    def saved_step(self) -> int | None:
        """The step of the last save."""
        return None if self.saved_at is None else self.saved_at[0]

    def take(self, place: Place, path: str) -> dict[str, Any]:
        """Note that this place is saved now; returns what its manifest says of its score."""
        score = self._score_at(place[0])
        if self.improved:
            self.best_score, self.best_path = self.fresh_score, path
        self.fresh_score, self.saved_score, self.saved_at = None, score, place
        if score is None or self.monitor is None:
            return {}
        return {"score": {"monitor": self.monitor.name, "value": score}}

    def undo(self, before: dict[str, Any]) -> None:
        """The save has failed: as before it, but for a value that was logged since."""
        fresh = self.fresh_score
        self.load_state_dict(before)
        if fresh is not None:
            self.fresh_score = fresh

    def _score_at(self, step: int) -> float | None:
        """The fresh score; where a step is saved again, the better one of its scores."""
        fresh, earlier = self.fresh_score, self.saved_score
        if self.monitor is None or earlier is None or step != self.saved_step:
            return fresh
        better = fresh is not None and self.monitor.is_better(fresh, than=earlier)
        return fresh if better else earlier

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
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


class Schedule:
    """The intervals of a Checkpoint.

    Args:
        every_n_steps: optimizer steps.
        every_n_epochs: epochs.
        every_seconds: a time.
        every: one of them, or a part of the run, as text.

    Attributes:
        is_empty: no interval was given.
        needs_votes: time and parts of the run are measured on the main process, whose decision
            the others follow by a vote.

    Raises:
        ValueError: an interval of nothing, or one that is given twice.

    Example:
        >>> from accel_callbacks.callbacks.checkpoint import Schedule
        >>> schedule = Schedule(every="100 steps")
        >>> schedule.step_is_due(200), schedule.step_is_due(250), schedule.needs_votes
        (True, False, False)
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        every_seconds: Every | None = None,
        every: Every | None = None,
    ) -> None:
        for name, count in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
            if count is not None and count < 1:
                raise ValueError(f"{name}={count} must be at least 1.")
        self._steps, self._epochs = every_n_steps, every_n_epochs
        self._clock: Cadence | None = None
        if every_seconds is not None:
            self._clock = Cadence(Interval.seconds(every_seconds, "every_seconds"))
        if every is not None:
            self._take(every)

    def _take(self, every: Every) -> None:
        """``every`` stands for one of the others."""
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
        """No interval was given."""
        return self._steps is None and self._epochs is None and self._clock is None

    @property
    def needs_votes(self) -> bool:
        """The processes could not agree without one."""
        return self._clock is not None

    @property
    def clock(self) -> str:
        """The interval by the clock, as text; empty if there is none."""
        return "" if self._clock is None else f"every {self._clock.interval}"

    def step_is_due(self, step: int, saved_step: int | None = None) -> bool:
        """Whether a step interval is over at this step, which is not saved yet."""
        return self._steps is not None and 0 < step != saved_step and step % self._steps == 0

    def epoch_is_due(self, epochs_done: int) -> bool:
        """Whether an epoch interval is over."""
        return self._epochs is not None and epochs_done % self._epochs == 0

    def clock_is_due(self, run: TrainingRun) -> bool:
        """On the main process: whether the clock says that it is time; False on the others."""
        return self._clock is not None and run.is_global_zero and self._clock.is_due(run)

    def restart_clock(self, run: TrainingRun) -> None:
        """A run begins, or something was saved: the time counts from here."""
        if self._clock is not None:
            self._clock.start(run)


class Checkpoint(ResumableState):
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
        self.reset_state()

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
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
            self._folder = training_state.open_folder(url, self.storage_options)
        return self._folder

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the state, unless ``load_state`` restored it, and probe the folder."""
        super().setup(run, model, stage)
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
        others = (one for one in run.checkpoint_callbacks if one is not self)
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
            training_state.write(
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
