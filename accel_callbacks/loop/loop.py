"""The state of the training loop, and the life of a run: which hook fires when."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

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
from accel_callbacks.distributed.daemon_threads import register_daemon_thread
from accel_callbacks.errors import ResumeError
from accel_callbacks.gradients import parameters_of
from accel_callbacks.loop.gradient_window import GradientWindow
from accel_callbacks.loop.local_metrics import LocalMetrics
from accel_callbacks.loop.own_batches import OwnBatches
from accel_callbacks.loop.run import TrainingRun, length_of
from accel_callbacks.loop.unprepared_steps import UnpreparedSteps
from accel_callbacks.precision.base import StepFinding
from accel_callbacks.recurrence import note_step

if TYPE_CHECKING:
    from accel_callbacks.callbacks.observer import Observer
    from accel_callbacks.loop.pass_ends import PassEnds

__all__ = ["LoaderProgress", "Loop", "UsedLoaders"]

_PATIENCE = 2.0  # seconds that an error waits for the device to tell which steps were skipped


class LoaderProgress:
    """Compares where the training loaders are with where they were at the last micro-batch."""

    __slots__ = ("_fresh", "_places")

    def __init__(self) -> None:
        self._places: dict[DataLoaderShard, tuple[int, int]] = {}
        self._fresh: list[DataLoaderShard] = []

    def remaining(
        self, active: Sequence[DataLoaderShard]
    ) -> tuple[int | None, Sequence[DataLoaderShard]]:
        """Return the number of micro-batches left, this one included, and who does not know it.

        Loaders iterated together, as by ``zip``, end with the shortest one. An outer loader that
        delivers only now and then does not count. The number is None where it is not known.

        Args:
            active: the loaders being iterated, the innermost last.
        """
        places = {loader: (loader.passes, loader.batch_index) for loader in active}
        fresh = [
            loader
            for loader in active
            if loader.trained and places[loader] != self._places.get(loader)
        ]
        chosen = set(active[-1:])
        if len(fresh) > 1:
            # Loaders that delivered in this and in the last micro-batch are iterated in lockstep.
            chosen.update(loader for loader in fresh if loader in self._fresh)
        self._places, self._fresh = places, fresh
        left = [loader.left for loader in chosen if loader.left is not None]
        return min(left, default=None), [loader for loader in chosen if loader.left is None]

    def clear(self) -> None:
        """Forget all loaders."""
        self._places.clear()
        self._fresh.clear()


class UsedLoaders:
    """The loader of the last training pass, and the loaders of validations and tests."""

    def __init__(self) -> None:
        self.training: DataLoaderShard | None = None
        self.validation: list[DataLoaderShard] = []
        self.test: list[DataLoaderShard] = []

    def add_evaluated(self, loader: DataLoaderShard, stage: str) -> None:
        """Add a loader of a validation or test."""
        known = self.test if stage == "test" else self.validation
        if not any(loader is evaluated for evaluated in known):
            known.append(loader)

    def expected(self, loaders: Sequence[DataLoaderShard]) -> DataLoaderShard | None:
        """Return the loader that training uses; before its first pass, the one that looks like it.

        That is the only one that shuffles, or the only one, of those that no evaluation has used.

        Args:
            loaders: the prepared loaders.
        """
        if self.training is not None:
            return self.training
        evaluated = {id(loader) for loader in (*self.validation, *self.test)}
        left = [loader for loader in loaders if id(loader) not in evaluated]
        left = [loader for loader in left if _shuffles(loader)] or left
        return left[0] if len(left) == 1 else None

    def clear(self) -> None:
        """Forget all loaders."""
        self.training = None
        self.validation.clear()
        self.test.clear()


def _is_in_train_mode(model: torch.nn.Module) -> bool:
    """Return whether a model, or a part of it that has trainable parameters, is in train mode."""
    return model.training or any(
        part.training and any(p.requires_grad for p in part.parameters(recurse=False))
        for part in model.modules()
    )


def _shuffles(loader: DataLoaderShard) -> bool:
    """Return whether the loader that was prepared draws its samples in a random order."""
    origin = loader.origin
    sampler = getattr(getattr(origin, "batch_sampler", None), "sampler", None)
    sampler = sampler or getattr(origin, "sampler", None)
    random = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return isinstance(sampler, random) or bool(getattr(sampler, "shuffle", False))


class Loop:
    """Keeps track of the loader being iterated, the phase and the run, and fires the hooks.

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
        outer: the loader of the training pass, None outside of one.
        model: the first prepared model that has an optimizer, as the user built it; hooks get it.
        unprepared_steps: the optimizers that step without being prepared.
        require_prepared_steps: raises for them in a run, and warns in another loop.
        own_batches: the batches of a loop that iterates no prepared loader.
        active: loaders being iterated, the innermost last.
        worked: True once the current training batch was trained on.
        stepped: optimizers that stepped since the global step was last counted.
        unsettled: steps to be counted once the device tells whether they were skipped, and None
            where a batch began.
        progress: where training loaders were at the last micro-batch.
        deferred: hooks to be fired by the next call of the script.
        pass_ends: compares the lengths of passes over several ranks, None on one.
        keep_boundary: keeps the state of a boundary, to which the run can be left.
        drain_votes: carries out a vote that is under way at the end of a run.
        tell_norms: calls a function with each norm that gradients are clipped by; None ends that.
        check_parameters: checks at each training pass for parameters that models have got since.
        saves: saves of the training state, also in the background.
        stages: the open evaluations, the innermost last.
        used_loaders: the loaders of each phase.
        stop_consumed: True if the run's stop ended a training that is over, so that another one
            may start.
        observers: see and may redirect runs, without being callbacks.
        after_step: called with each optimizer that has stepped, None if nobody is to know.
        before_work: called with the name of the first backward or step after a load, None if
            nothing is to be checked.
        borrowed: the checkpoint whose weights the models hold for an evaluation.

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
        self.schedulers = schedulers
        self.model: torch.nn.Module | None = None
        self.active: list[DataLoaderShard] = []
        self.progress = LoaderProgress()
        self.deferred: list[Callable[[], object]] = []
        self.local_metrics = LocalMetrics() if collectives.has_peers() else None
        self.saves = BackgroundSaves(self.fire)
        self.stages: list[str] = []
        self.used_loaders = UsedLoaders()
        self.warned_no_saver = False
        self.eval_loaders = 0
        self.last_loss: torch.Tensor | None = None
        self.before_work: Callable[[str], None] | None = None
        self._half_loaded: str | None = None
        self.observers: Sequence[Observer] = ()
        self.borrowed: str | None = None
        self.worked = False
        self.epochs_counted = self.stop_consumed = False
        self.stepped: tuple[torch.optim.Optimizer, ...] = ()
        self.unsettled: deque[tuple[torch.optim.Optimizer, StepFinding] | None] = deque()
        self.outer: DataLoaderShard | None = None
        self._random_after_step: tuple[int, Any] | None = None  # of the batch of this index
        self.unprepared_steps = UnpreparedSteps(optimizers)
        self.require_prepared_steps: Callable[[], None] = lambda: None
        self.own_batches = OwnBatches(optimizers, schedulers)
        self.after_step: Callable[[Any], None] | None = self.own_batches.note_call
        self.pass_ends: PassEnds | None = None
        self.keep_boundary: Callable[[], None] = lambda: None
        self.drain_votes: Callable[[], None] = lambda: None
        self.check_parameters: Callable[[], None] = lambda: None
        self.tell_norms: Callable[[Callable[[torch.Tensor], None] | None], None] = lambda _: None
        self._cut_short = self._passed = self._ignores_stop = False
        # Of random generators: how to capture it, and what it was where a stop cut an epoch short.
        self.capture_random: Callable[[], Any] | None = None
        self.random_at_stop: Any = None
        self._warming_up = self._settling = self._fit_started = self._train_started = False
        self._pending_teardowns: list[Callable[..., None]] | None = None
        self._ended: TrainingRun | None = None

    @property
    def phase(self) -> str:
        """``"train"``, ``"validation"`` or ``"test"``: what iterating a loader would count as.

        Outside of ``evaluate``, a pass with gradients off, or with models in eval mode, is
        validation.
        """
        if self.stages:
            return self.stages[-1]
        if not torch.is_grad_enabled():
            return "validation"
        # Of several models, a teacher that stays in eval mode does not count.
        models = self.models if len(self.models) <= 1 else self.trained_models()
        trains = not models or any(map(_is_in_train_mode, models))
        if not trains and self.active:
            trains = self.trains_in_eval_mode(self.active[-1])
        return "train" if trains else "validation"

    def trains_in_eval_mode(self, loader: DataLoaderShard) -> bool:
        """Return whether a pass over a loader would train models in eval mode, as those before."""
        if not self.run.in_eval_mode or self.stages or not torch.is_grad_enabled():
            return False
        return loader.resumes or loader is self.used_loaders.expected(self.loaders)

    def trained_models(self) -> list[torch.nn.Module]:
        """Return the prepared models that have an optimizer; all of them if none has."""
        owned = {id(parameter) for parameter in parameters_of(self.optimizers)}
        trained = [m for m in self.models if any(id(p) in owned for p in m.parameters())]
        return trained or list(self.models)

    @property
    def half_loaded(self) -> str | None:
        """The checkpoint whose load failed after it had changed something."""
        return self._half_loaded

    @half_loaded.setter
    def half_loaded(self, path: str | None) -> None:
        self._half_loaded = path
        self.before_work = None if path is None else self.require_loaded

    @property
    def evaluating(self) -> int:
        """Number of open evaluations."""
        return len(self.stages)

    @property
    def fitting(self) -> bool:
        """True between ``setup`` and ``teardown``."""
        return self._fit_started

    @property
    def iterating(self) -> bool:
        """True while a prepared loader is being iterated."""
        return bool(self.active)

    @property
    def between_passes(self) -> bool:
        """True if prepared loaders are used, and none is being iterated now."""
        return self._passed and not self.active

    @property
    def in_window(self) -> bool:
        """True between the micro-batches of one gradient window."""
        return self.window.is_open

    @property
    def in_lockstep(self) -> bool:
        """False in a block of ``join_uneven_inputs``, where ranks take unequal numbers of steps."""
        return not self.window.normalizer.closed

    def position(self) -> tuple[int, int, int]:
        """Return the epoch, the batches of it that were begun, and the steps of the run."""
        return self.run.current_epoch, self.run.batch_idx + 1, self.run._global_step

    @property
    def savers(self) -> list[Any]:
        """The callbacks that save."""
        return self.dispatch.savers

    @property
    def train_loader(self) -> DataLoaderShard | None:
        """The loader of the current or last training pass."""
        return self.used_loaders.training

    @property
    def validation_loaders(self) -> list[DataLoaderShard]:
        """The loaders of validations, in the order of their first use."""
        return self.used_loaders.validation

    @property
    def test_loaders(self) -> list[DataLoaderShard]:
        """The loaders of tests, in the order of their first use."""
        return self.used_loaders.test

    def saved_folders(self) -> list[Folder]:
        """Return the folders to which callbacks save, with their storage options."""
        return [callback.resume_root(self.run) for callback in self.savers]

    def require_loaded(self, action: str) -> None:
        """Raise ResumeError if the last ``load_state`` failed midway.

        Args:
            action: the method that would use the mixed state, for the message.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> loop = Accelerator(cpu=True).loop
            >>> loop.half_loaded = "runs/step-1"
            >>> loop.require_loaded("backward")
            Traceback (most recent call last):
            accel_callbacks.errors.ResumeError: backward: loading runs/step-1 failed midway, and \
models and optimizers hold a mixture of it and of their state before. Load a checkpoint first: \
load_state() takes the newest valid one.
        """
        if self.half_loaded is not None:
            raise ResumeError(
                f"{action}: loading {self.half_loaded} failed midway, and models and optimizers "
                "hold a mixture of it and of their state before. Load a checkpoint first: "
                "load_state() takes the newest valid one."
            )

    def require_own_weights(self, action: str) -> None:
        """Raise RuntimeError while the models hold the weights of a checkpoint, for an evaluation.

        Args:
            action: the method that would use or change the training state, for the message.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).loop.require_own_weights("save_state")
        """
        if self.borrowed is not None:
            raise RuntimeError(
                f"{action}: the models hold the weights of {self.borrowed}, for "
                "evaluate(checkpoint=...). Call it after that block, which puts the weights of "
                "the run back; save_model() works inside too."
            )

    def fire(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks with the run and the model as first arguments."""
        for method in self.dispatch.hooks[hook]:
            method(self.run, self.model, *args)

    def settle(self) -> None:
        """Fire the deferred hooks."""
        # A deferred hook may save, and a save settles: the hooks behind it must stay behind it.
        if self._settling:
            return
        self._settling = True
        try:
            while self.deferred:
                self.deferred.pop(0)()
            if self.own_batches.waits:
                self.own_batches.finish()
        finally:
            self._settling = False

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
        if self.fitting and "setup" in entry.calls:
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
        if self.fitting and "teardown" in entry.calls:
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

    def share_identity(self, run: TrainingRun) -> None:
        """Collective: give the run the id drawn on rank 0, and check that callbacks are alike."""
        run.run_id = collectives.broadcast_object(run.run_id)
        self.dispatch.require_same_on_all_ranks()

    # --- the life of a run --------------------------------------------------------------------

    def begin_fit(self, restore: Callable[[], None] | None = None) -> None:
        """Fire ``setup``, restore a checkpoint, fire ``on_fit_start``; once a run."""
        if self._fit_started:
            return
        # Before the hooks, because a `setup` that logs or saves comes here again.
        self._fit_started, self.stop_consumed = True, False
        self._count_batches()
        self.unprepared_steps.begin()
        if self.savers and self.leases.run is not self.run:
            self.leases.hold_together(self.saved_folders(), self.run)
        self.fire("setup", "fit")
        if restore is not None:
            restore()
        self.fire("on_fit_start")

    def begin_evaluation(self) -> None:
        """Begin the run with its first evaluation; one after its end fires no ``setup`` again."""
        if self._ended is not self.run:
            self.begin_fit()
        if self.pass_ends is not None:
            self.pass_ends.check("evaluate")

    def begin_training(self) -> None:
        """Fire ``on_train_start``, once a run, before the first training batch."""
        self.begin_fit()
        if not self._train_started:
            self._train_started = self._warming_up = True
            register_daemon_thread()
            self._count_batches()
            self.fire("on_train_start")

    def _count_batches(self) -> None:
        """Set the batches of an epoch for hooks before the first pass over the training data."""
        loader = self.used_loaders.expected(self.loaders)
        if loader is not None:
            self.run.num_training_batches = length_of(loader)

    def withdraw_consumed_stop(self) -> None:
        """Withdraw a stop that ended an earlier training."""
        if self.stop_consumed and self.run.should_stop:
            self.run.should_stop = False

    def end_warm_up(self) -> None:
        """Forget a training without a prepared loader or epochs: some steps before a run."""
        # To save them would be to resume from them.
        if self._warming_up:
            self.own_batches.drop()
            self._train_started = False

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
        self.drain_votes()
        if self._train_started:
            self.fire("on_train_end")
        # A run succeeds only if its last save does, so the wait comes before on_fit_end.
        self.saves.wait()
        if not self._fit_started:
            return
        self.fire("on_fit_end")
        # If a teardown raises, fail_fit calls those that are left, and none twice.
        self._pending_teardowns = left = list(self.dispatch.hooks["teardown"])
        while left:
            left.pop(0)(self.run, self.model, "fit")
        self._reset()

    def fail_fit(self, error: BaseException) -> None:
        """Fire the hooks of a run that fails."""
        if self.unsettled:
            self.settle_after_error()
        note_step(error, self.run.global_step)  # the launcher compares it with the last attempt's
        self.run.interrupted = isinstance(error, KeyboardInterrupt)
        if self._fit_started:
            hooks, left = self.dispatch.hooks, self._pending_teardowns
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
        self._fit_started = self._train_started = self.epochs_counted = False
        self._ended = self.run
        if not self.optimizers:
            self.unprepared_steps.stop()
        # The stop of a run that is over must not end a plain loop that follows in the script.
        self._pending_teardowns, self.stop_consumed = None, self.run.should_stop
        self.drop_passes()

    def forget(self) -> None:
        """Drop all that belongs to prepared objects, without firing a hook."""
        self.drop_passes()
        self.window.close()
        self.model = self.last_loss = self.half_loaded = self._ended = None
        self.used_loaders.clear()
        self.window.normalizer.forget()
        self.window.dirty = self._passed = False
        self.unprepared_steps.stop()
        self.unprepared_steps.forget()

    def drop_passes(self) -> None:
        """Close all passes over loaders."""
        self._cut_short, self.random_at_stop = False, None
        for group in (self.deferred, self.active, self.progress, self.stages):
            group.clear()
        self.settle_steps()
        self.stepped = ()
        self.outer, self.after_step = None, self.own_batches.note_call
        self.own_batches.drop()
        # After a load, the open window is the one that the checkpoint holds.
        if not self.run.awaits_training:
            self.window.abandon()

    # --- epochs -------------------------------------------------------------------------------

    def end_epoch(self, epoch: int, *, counted: bool) -> None:
        """Fire ``on_train_epoch_end``; count the epoch as done unless a stop cut it short."""
        # A resume continues inside of an epoch that was cut short. A callback may have withdrawn
        # the stop meanwhile; then the epoch is done after all.
        cut_short, self._cut_short = self._cut_short, False
        if not (cut_short and self.run.should_stop):
            self.run.epoch_open = False
            self.run.epochs_done = epoch + 1
            if counted:
                self.run.first_epoch = epoch + 1
        if self.savers:  # which may wait for counted steps, and save only once the run is over
            self.require_prepared_steps()
        self.fire("on_train_epoch_end")

    def open_plain_epoch(self, epoch: int) -> None:
        """Start an epoch at the first batch of a pass, in a loop without ``run.epochs``."""
        # A resume in the middle of an epoch continues it: on_train_epoch_start has fired before.
        if not self.epochs_counted and not self.run.epoch_open:
            self.run.current_epoch = epoch
            self.open_epoch(counted=False)

    def open_epoch(self, *, counted: bool) -> None:
        """Start an epoch of the loaders, and fire ``on_train_epoch_start``."""
        self.run.epoch_open, self.run.batch_idx = True, -1
        self._warming_up = False
        for loader in self.loaders:
            loader.begin_epoch(counted=counted)
        self.fire("on_train_epoch_start")

    def close_plain_epoch(self, epoch: int) -> None:
        """Defer the end of the epoch to the next call of the script."""
        # Code after the loop, such as an evaluation, still belongs to the epoch for the user: hooks
        # at its end fire when the script calls the library again.
        if not self.epochs_counted and self.run.epoch_open:
            self.deferred.append(lambda: self.end_epoch(epoch, counted=False))

    # --- passes over loaders ------------------------------------------------------------------

    def enter(self, loader: DataLoaderShard, *, outer: bool) -> int:
        """Start a pass; return its number, for :meth:`leave`."""
        # An iterator that was kept and not read to its end is still active.
        if loader in self.active:
            self.active.remove(loader)
        self.active.append(loader)
        self._passed = True
        if outer:
            self.random_at_stop = self._random_after_step = self.after_step = None
            self.outer = self.used_loaders.training = loader
            self.own_batches.drop()  # its data comes from this loader
            self.check_parameters()
            self._warming_up = False
        loader.passes += 1
        return loader.passes

    def leave(self, loader: DataLoaderShard, token: int) -> bool:
        """End a pass; return False if a newer pass over the same loader has replaced it."""
        if loader.passes != token:
            return False
        if self.outer is loader:
            self.outer, self.after_step = None, self.own_batches.note_call
            self.window.leave_loader()
        if loader in self.active:
            self.active.remove(loader)
        return True

    def begin_own_batch(self) -> None:
        """Start a batch that no prepared loader delivers."""
        self.worked, self.last_loss = False, None
        # A loop over data of its own that goes on after a stop is not cut short by it.
        self._cut_short, self._ignores_stop = False, self.run.should_stop
        self.run.num_training_batches = float("inf")
        self.run.batch_idx += 1

    def drop_own_batch(self) -> None:
        """Forget a batch that an error has ended; the next one has its index if it did no work."""
        self.own_batches.drop()
        self.run.batch_idx -= not self.worked

    def stop_after_own_batch(self) -> None:
        """Note that a stop cuts the epoch short, unless the loop over its data is over anyway."""
        ended = self._settling or self._ignores_stop
        self._cut_short = self.run.epoch_open and not ended
        self._keep_random()

    def stop_pass(self, loader: DataLoaderShard) -> None:
        """Stop after this batch; unless it was the last, the epoch is cut short."""
        self._cut_short = not loader.on_last
        if loader.on_last:
            loader.end_pass()
        self._keep_random()

    def _keep_random(self) -> None:
        """Keep the state of random generators where an epoch is cut short.

        A resume goes on there, and what the script draws from now on, such as in an evaluation, is
        drawn in the unbroken run only after the rest of the epoch.
        """
        if self._cut_short and self.capture_random is not None:
            self.random_at_stop = self.random_after_step() or self.capture_random()

    def keep_random_after_steps(self) -> None:
        """Keep the state of random generators after each step of this pass."""

        def keep(optimizer: Any) -> None:
            if self.capture_random is not None:
                self._random_after_step = self.run.batch_idx, self.capture_random()

        self.after_step = keep

    def random_after_step(self) -> Any:
        """Return the state of random generators after the step of this batch, if it is kept."""
        kept = self._random_after_step
        return kept[1] if kept is not None and kept[0] == self.run.batch_idx else None

    # --- the step -----------------------------------------------------------------------------

    def count_later(self, optimizer: torch.optim.Optimizer, finding: StepFinding) -> None:
        """Count an optimizer step once it is read whether it was skipped."""
        self.unsettled.append((optimizer, finding))
        # The host runs one step of each optimizer ahead of the device, and no more.
        self._settle_steps(len(self.optimizers))

    def settle_steps(self) -> None:
        """Count the steps of :meth:`count_later`, in their order; waits for the device."""
        if self.unsettled:
            self._settle_steps(0)

    def settle_after_error(self) -> None:
        """Count the steps while an error unwinds, unless the device fails or hangs too."""
        findings = [step[1] for step in self.unsettled if step is not None]
        deadline = time.monotonic() + _PATIENCE
        with suppress(Exception):
            while not (ready := all(finding.is_ready for finding in findings)):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
            if ready:
                self.settle_steps()
        self.unsettled.clear()
        self.run.settle_steps = None

    def _settle_steps(self, keep: int) -> None:
        """Count steps until findings of no more than ``keep`` are left to be read."""
        waiting = self.unsettled
        left = sum(step is not None for step in waiting)
        self.run.settle_steps = None  # counting asks for the steps so far
        while waiting and (left > keep or waiting[0] is None):
            step = waiting.popleft()
            if step is None:  # a batch began here
                self.stepped = ()
                continue
            left -= 1
            optimizer, finding = step
            if finding.stepped:
                self.count_step(optimizer)
        self.run.settle_steps = self.settle_steps if waiting else None

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer step; optimizers that alternate within one batch count as one."""
        run = self.run
        if run.settle_steps is not None:
            run.settle_steps()
        # The same optimizer twice in one batch is two steps, as in several passes over one batch.
        stepped = self.stepped
        if stepped and optimizer not in stepped:
            self.stepped = (*stepped, optimizer)
        else:
            run._global_step += 1  # not through the property: this is the hot path
            self.stepped = (optimizer,)

    def stepped_in_batch(self) -> Collection[torch.optim.Optimizer]:
        """Return the prepared optimizers that have stepped since the current batch began."""
        self.settle_steps()
        return self.own_batches.stepped if self.own_batches.is_open else self.stepped

    def next_step(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the global step, from 1, that an optimizer takes next."""
        self.settle_steps()
        shares = bool(self.stepped) and optimizer not in self.stepped
        return self.run.global_step if shares else self.run.global_step + 1

    def gradient_scale(self) -> float | torch.Tensor:
        """Collective: return the factor that brings gradients of this window to their true size."""
        normalizer = self.window.normalizer
        return normalizer.factor() if normalizer.active else self.window.correction

    def drop_gradients(self) -> None:
        """Clear the gradients of an abandoned window."""
        # Through the prepared optimizers, so that on_before_zero_grad fires and fp16 forgets them.
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.window.normalizer.forget()
        self.window.dirty = False
