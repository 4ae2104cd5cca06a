"""The loop of an Accelerator, and the life of its runs: which hook fires when."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.callbacks.dispatch.dispatcher import Dispatcher, Entry
from accel_callbacks.callbacks.dispatch.functions import (
    Filters,
    FunctionCallback,
    FunctionHandle,
    name_of,
)
from accel_callbacks.callbacks.dispatch.registration import configured
from accel_callbacks.checkpoint.async_save import BackgroundSaves
from accel_callbacks.checkpoint.folder_leases import Folder, FolderLeases
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.distributed.abort import register_daemon_thread
from accel_callbacks.gradients import parameters_of
from accel_callbacks.loop.gradient_window import GradientWindow
from accel_callbacks.loop.local_metrics import LocalMetrics
from accel_callbacks.loop.own_batches import OwnBatches
from accel_callbacks.loop.position import TrainingPosition
from accel_callbacks.loop.run import TrainingRun, length_of
from accel_callbacks.loop.step_state import RunFlags, StepState
from accel_callbacks.loop.unprepared_steps import UnpreparedSteps
from accel_callbacks.recurrence import note_step

if TYPE_CHECKING:
    from accel_callbacks.callbacks.observer import Observer
    from accel_callbacks.loop.pass_ends import PassEnds

__all__ = ["BoundaryHooks", "Loop"]


def _is_in_train_mode(model: torch.nn.Module) -> bool:
    """Return whether a model, or a part of it that has trainable parameters, is in train mode."""
    return model.training or any(
        part.training and any(p.requires_grad for p in part.parameters(recurse=False))
        for part in model.modules()
    )


def _do_nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class BoundaryHooks:
    """The functions that others put in for the boundaries between steps.

    Attributes:
        keep: keeps the state of a boundary, to which the run can be left.
        drain_votes: carries out a vote that is under way at the end of a run.
    """

    keep: Callable[[], None] = _do_nothing
    drain_votes: Callable[[], None] = _do_nothing


class Loop:
    """Keeps what belongs to the loop of an Accelerator together, and fires the hooks of its runs.

    Where the loop is stands in three records: ``position`` (passes, epochs, evaluations), ``step``
    (the optimizer step under way) and ``flags`` (what has begun in the life of the run).

    A loop that is left by ``break`` leaves hooks to be fired: the end of its last batch, the end of
    an evaluation. They are deferred to the next call of the script, and dropped if the script ends
    with an exception: a hook must not save, or wait in a collective, while an error unwinds.

    Args:
        run: the state of the run; replaced when a new run starts.
        dispatch: the callbacks.
        window: the gradient window.
        models: the prepared models, a list that grows.
        optimizers: the prepared optimizers, a list that grows.
        loaders: the prepared loaders, a list that grows.
        schedulers: the prepared schedulers, a list that grows.
        leases: of the folders that the run writes to.

    Attributes:
        model: the first prepared model that has an optimizer, as the user built it; hooks get it.
        position: the passes, epochs and evaluations that the loop is in.
        step: the optimizer step under way.
        flags: what has begun in the life of the run.
        boundary: what others do between two steps.
        unprepared_steps: the optimizers that step without being prepared.
        own_batches: the batches of a loop that iterates no prepared loader.
        pass_ends: compares the lengths of passes over several ranks, None on one.
        saves: saves of the training state, also in the background.
        observers: see and may redirect runs, without being callbacks.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> loop = Accelerator(cpu=True).loop
        >>> loop.phase
        'train'
    """

    def __init__(
        self,
        run: TrainingRun,
        dispatch: Dispatcher,
        window: GradientWindow,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        loaders: Sequence[DataLoaderShard],
        schedulers: Sequence[Any],
        leases: FolderLeases,
    ) -> None:
        self.run = run
        self.leases = leases
        self.dispatch = dispatch
        self.window = window
        self.models = models
        self.optimizers = optimizers
        self.loaders = loaders
        self.model: torch.nn.Module | None = None
        self.observers: Sequence[Observer] = ()
        self.saves = BackgroundSaves(self.fire)
        self.local_metrics = LocalMetrics() if collectives.has_peers() else None
        self.pass_ends: PassEnds | None = None
        self.unprepared_steps = UnpreparedSteps(optimizers)
        self.schedulers = schedulers
        self.own_batches = OwnBatches(optimizers, schedulers)
        self.position = TrainingPosition()
        self.step = StepState(after_step=self.own_batches.note_call)
        self.flags = RunFlags()
        self.boundary = BoundaryHooks()

    @property
    def phase(self) -> str:
        """``"train"``, ``"validation"`` or ``"test"``: what iterating a loader would count as.

        Outside of ``evaluate``, a pass with gradients off, or with models in eval mode, is
        validation.
        """
        if self.position.stages:
            return self.position.stages[-1]
        if not torch.is_grad_enabled():
            return "validation"
        # Of several models, a teacher that stays in eval mode does not count.
        models = self.models if len(self.models) <= 1 else self.trained_models()
        trains = not models or any(map(_is_in_train_mode, models))
        if not trains and self.position.active:
            trains = self.trains_in_eval_mode(self.position.active[-1])
        return "train" if trains else "validation"

    def trains_in_eval_mode(self, loader: DataLoaderShard) -> bool:
        """Return whether a pass over a loader would train models in eval mode, as those before."""
        position = self.position
        if not self.run.in_eval_mode or position.stages or not torch.is_grad_enabled():
            return False
        return loader.resumes or loader is position.used_loaders.expected(self.loaders)

    def trained_models(self) -> list[torch.nn.Module]:
        """Return the prepared models that have an optimizer; all of them if none has."""
        owned = {id(parameter) for parameter in parameters_of(self.optimizers)}
        trained = [m for m in self.models if any(id(p) in owned for p in m.parameters())]
        return trained or list(self.models)

    # --- for the run, whose host may be another library's trainer -----------------------------

    @property
    def evaluating(self) -> int:
        """Number of open evaluations."""
        return len(self.position.stages)

    @property
    def epochs_counted(self) -> bool:
        """True inside of ``run.epochs``."""
        return self.position.epochs_counted

    @property
    def iterating(self) -> bool:
        """True while a prepared loader is being iterated."""
        return bool(self.position.active)

    @property
    def in_window(self) -> bool:
        """True between the micro-batches of one gradient window."""
        return self.window.is_open

    @property
    def in_lockstep(self) -> bool:
        """False in a block of ``join_uneven_inputs``, where ranks take unequal numbers of steps."""
        return not self.window.normalizer.closed

    @property
    def savers(self) -> list[Any]:
        """The callbacks that save."""
        return self.dispatch.savers

    @property
    def train_loader(self) -> DataLoaderShard | None:
        """The loader of the current or last training pass."""
        return self.position.used_loaders.training

    @property
    def validation_loaders(self) -> list[DataLoaderShard]:
        """The loaders of validations, in the order of their first use."""
        return self.position.used_loaders.validation

    @property
    def test_loaders(self) -> list[DataLoaderShard]:
        """The loaders of tests, in the order of their first use."""
        return self.position.used_loaders.test

    def gradient_scale(self) -> float | torch.Tensor:
        """Collective: return the factor that brings gradients of this window to their true size."""
        normalizer = self.window.normalizer
        return normalizer.factor() if normalizer.active else self.window.correction

    def next_step(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the global step, from 1, that an optimizer takes next."""
        step = self.run.global_step  # which counts the steps so far
        shares = bool(self.step.stepped) and optimizer not in self.step.stepped
        return step if shares else step + 1

    # --- the step -----------------------------------------------------------------------------

    def progress(self) -> tuple[int, int, int]:
        """Return the epoch, the batches of it that were begun, and the steps of the run."""
        return self.run.current_epoch, self.run.batch_idx + 1, self.run._global_step

    def stepped_in_batch(self) -> Collection[torch.optim.Optimizer]:
        """Return the prepared optimizers that have stepped since the current batch began."""
        self.step.settle(self.run)
        return self.own_batches.stepped if self.own_batches.is_open else self.step.stepped

    def drop_gradients(self) -> None:
        """Clear the gradients of an abandoned window."""
        # Through the prepared optimizers, so that on_before_zero_grad fires and fp16 forgets them.
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.window.normalizer.forget()
        self.window.dirty = False

    # --- hooks --------------------------------------------------------------------------------

    def fire(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks with the run and the model as first arguments."""
        for method in self.dispatch.hooks[hook]:
            method(self.run, self.model, *args)

    def settle(self) -> None:
        """Fire the deferred hooks."""
        # A deferred hook may save, and a save settles: the hooks behind it must stay behind it.
        if self.flags.settling:
            return
        deferred = self.position.deferred
        self.flags.settling = True
        try:
            while deferred:
                deferred.pop(0)()
            if self.own_batches.waits:
                self.own_batches.finish()
        finally:
            self.flags.settling = False

    # --- callbacks that come and go -----------------------------------------------------------

    def add_callback(self, wanted: Any) -> Entry:
        """Register a callback; during a run, set it up and restore its state.

        Args:
            wanted: the callback, or what ``configured`` returned.
        """
        (entry,) = self.dispatch.add(wanted)
        # A rank without it would not take part in its collectives.
        if entry.votes or entry.collective:
            self.dispatch.require_same_on_all_ranks()
        if self.flags.fit_started and "setup" in entry.calls:
            entry.calls["setup"](self.run, self.model, "fit")
        if self.run.resumed_from is not None:
            self.dispatch.restore_unclaimed(entry)
        return entry

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback; during a run, tear it down.

        Raises:
            ValueError: it is not registered.
        """
        entry = self.dispatch.remove(callback)
        # A removed entry is disabled, so that the round of hooks being fired skips it.
        if self.flags.fit_started and "teardown" in entry.calls:
            entry.disabled = False
            try:
                entry.calls["teardown"](self.run, self.model, "fit")
            finally:
                entry.disabled = True

    def discard_callback(self, callback: Any) -> None:
        """Remove a callback if it is still registered."""
        if any(callback is registered for registered in self.dispatch.callbacks):
            self.remove_callback(callback)

    def add_function(
        self,
        function: Callable[..., Any],
        hook: str,
        filters: Filters,
        *,
        on_error: str,
        can_vote: bool,
    ) -> FunctionHandle:
        """Register a function for one hook; see ``Accelerator.on``.

        Args:
            function: called with the arguments that it names.
            hook: the checked name.
            filters: which calls of the hook reach it.
            on_error: ``"raise"``, ``"warn"`` or ``"disable"``.
            can_vote: it may stop the run in the middle of an epoch.
        """
        key = self.dispatch.free_key(f"{name_of(function)}:{hook}")
        callback = FunctionCallback(function, hook, filters, key, self.dispatch.retire)
        callback.can_vote = can_vote
        self.add_callback(configured(callback, on_error=on_error))
        return FunctionHandle(callback, self.discard_callback, function)

    # --- the life of a run --------------------------------------------------------------------

    def share_identity(self, run: TrainingRun) -> None:
        """Collective: give the run the id drawn on rank 0, and check that callbacks are alike."""
        run.run_id = collectives.broadcast_object(run.run_id)
        self.dispatch.require_same_on_all_ranks()

    def saved_folders(self) -> list[Folder]:
        """Return the folders to which callbacks save, with their storage options."""
        return [callback.resume_root(self.run) for callback in self.savers]

    def begin_fit(self, restore: Callable[[], None] | None = None) -> None:
        """Fire ``setup``, restore a checkpoint, fire ``on_fit_start``; once a run."""
        if self.flags.fit_started:
            return
        # Before the hooks, because a `setup` that logs or saves comes here again.
        self.flags.fit_started, self.flags.stop_consumed = True, False
        self._count_batches()
        self.unprepared_steps.begin()
        # In a plain loop; `accel.run` has taken them before it looked for a checkpoint.
        if self.savers and self.leases.run is not self.run:
            self.leases.hold_together(self.saved_folders(), self.run)
        # A `setup` sees what the script has built; `on_fit_start` sees what was restored.
        self.fire("setup", "fit")
        if restore is not None:
            restore()
        self.fire("on_fit_start")

    def begin_evaluation(self) -> None:
        """Begin the run with its first evaluation; one after its end fires no ``setup`` again."""
        if self.flags.ended is not self.run:
            self.begin_fit()
        if self.pass_ends is not None:
            self.pass_ends.check("evaluate")

    def begin_training(self) -> None:
        """Fire ``on_train_start``, once a run, before the first training batch."""
        self.begin_fit()
        if not self.flags.train_started:
            self.flags.train_started = self.flags.warming_up = True
            register_daemon_thread()
            self._count_batches()
            self.fire("on_train_start")

    def _count_batches(self) -> None:
        """Set the batches of an epoch for hooks before the first pass over the training data."""
        loader = self.position.used_loaders.expected(self.loaders)
        if loader is not None:
            self.run.num_training_batches = length_of(loader)

    def end_warm_up(self) -> None:
        """Forget a training without a prepared loader or epochs: some steps before a run."""
        # To save them would be to resume from them.
        if self.flags.warming_up:
            self.own_batches.drop()
            self.flags.train_started = False

    def end_fit(self, error: BaseException | None = None) -> None:
        """End the run; an error in an end hook fails it."""
        try:
            if error is None:
                self.finish_fit()
        except BaseException as problem:
            error = problem
            raise
        finally:
            if error is not None:
                self.fail_fit(error)

    def finish_fit(self) -> None:
        """Fire the hooks of a run that succeeds; if one raises, the run is not over yet."""
        self.settle()  # an evaluation after the end of the run may have left hooks too
        # After the deferred hooks, the last of which may have begun the vote.
        self.boundary.drain_votes()
        if self.flags.train_started:
            self.fire("on_train_end")
        # A run succeeds only if its last save does, so the wait comes before on_fit_end.
        self.saves.wait()
        if not self.flags.fit_started:
            return
        self.fire("on_fit_end")
        # If a teardown raises, fail_fit calls those that are left, and none twice.
        self.flags.pending_teardowns = left = list(self.dispatch.hooks["teardown"])
        while left:
            left.pop(0)(self.run, self.model, "fit")
        self._reset()

    def fail_fit(self, error: BaseException) -> None:
        """Fire the hooks of a run that fails."""
        if self.step.unsettled:
            self.step.settle_after_error(self.run)
        note_step(error, self.run.global_step)  # the launcher compares it with the last attempt's
        self.run.interrupted = isinstance(error, KeyboardInterrupt)
        if self.flags.fit_started:
            hooks, left = self.dispatch.hooks, self.flags.pending_teardowns
            self._call_safely(hooks["on_exception"], error)
            self._call_safely(hooks["teardown"] if left is None else left, "fit")
            self._reset()
        # Last: on_exception may save, and other ranks may be gone, so this is not collective.
        self.saves.abandon()

    def _call_safely(self, methods: Sequence[Callable[..., None]], *args: Any) -> None:
        """Call hooks while an error unwinds; print their own errors, and raise none."""
        for method in methods:
            try:
                method(self.run, self.model, *args)
            except Exception:
                traceback.print_exc()

    def _reset(self) -> None:
        """Reset, so that another run can start."""
        self.flags.end(self.run)
        self.position.epochs_counted = False
        if not self.optimizers:
            self.unprepared_steps.stop()
        self.drop_passes()

    def forget(self) -> None:
        """Drop all that belongs to prepared objects, without firing a hook."""
        self.drop_passes()
        self.window.close()
        self.model = self.step.last_loss = self.flags.ended = None
        self.step.set_half_loaded(None)
        self.position.used_loaders.clear()
        self.window.normalizer.forget()
        self.window.dirty = self.position.has_passes = False
        self.unprepared_steps.stop()
        self.unprepared_steps.forget()

    def drop_passes(self) -> None:
        """Close all passes over loaders."""
        self.position.close()
        self.step.settle(self.run)
        self.step.stepped, self.step.after_step = (), self.own_batches.note_call
        self.own_batches.drop()
        # After a load, the open window is the one that the checkpoint holds.
        if not self.run.awaits_training:
            self.window.abandon()
