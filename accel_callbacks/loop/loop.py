"""Loop: state of the loop and which hook fires when."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from accel_callbacks.callbacks.dispatch.dispatcher import Dispatcher
from accel_callbacks.checkpoint.async_save import BackgroundSaves
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.loop.accumulation import GradientWindow
from accel_callbacks.loop.passes import counted_epochs, evaluation_pass, feeding_pass, training_pass
from accel_callbacks.loop.run import TrainingRun

__all__ = ["Deliveries", "LoadersSeen", "Loop"]


class Deliveries:
    """Notes of the training loaders that delivered a batch.

    Attributes:
        fresh: those that did since the last micro-batch began.

    Example:
        >>> from accel_callbacks.loop.loop import Deliveries
        >>> Deliveries().remaining(None)
        (None, False)
    """

    __slots__ = ("_before", "fresh")

    def __init__(self) -> None:
        self.fresh: list[DataLoaderShard] = []
        self._before: list[DataLoaderShard] = []

    def note(self, loader: DataLoaderShard) -> None:
        """A loader moved on; in a loop without ``accumulate`` nobody ever takes the notes away."""
        if loader not in self.fresh:
            self.fresh.append(loader)

    def remaining(self, innermost: DataLoaderShard | None) -> tuple[int | None, bool]:
        """(micro-batches left with this one if known, whether this is the last).

        Loaders read side by side, as by ``zip``, end with the shortest; an outer loader that
        moves on only now and then does not count.

        Args:
            innermost: the loader whose loop was entered last.
        """
        now, self.fresh = self.fresh, []
        before, self._before = self._before, now
        if len(now) <= 1:
            return (None, False) if innermost is None else (innermost.left, innermost.on_last)
        chosen = {one for one in now if one in before} | ({innermost} if innermost else set())
        known = [one.left for one in chosen if one.left is not None]
        return min(known, default=None), any(one.on_last for one in chosen)

    def clear(self) -> None:
        """No loop is open any more."""
        self.fresh.clear()
        self._before.clear()


class LoadersSeen:
    """The loader that was trained on last, and those that were validated and tested on.

    Example:
        >>> from accel_callbacks.loop.loop import LoadersSeen
        >>> LoadersSeen().training is None
        True
    """

    def __init__(self) -> None:
        self.training: DataLoaderShard | None = None
        self.validation: list[DataLoaderShard] = []
        self.test: list[DataLoaderShard] = []

    def evaluated(self, loader: DataLoaderShard, stage: str) -> None:
        """It is iterated in this stage."""
        known = self.test if stage == "test" else self.validation
        if not any(loader is one for one in known):
            known.append(loader)

    def forget(self) -> None:
        """What was prepared is gone."""
        self.training = None
        self.validation.clear()
        self.test.clear()


class Loop:
    """Knows which loader is being iterated and in which phase, and fires the hooks around it.

    What a loop leaves open when it is broken off (the end of the last batch, the end of an
    evaluation) is fired by the next thing the script does, and dropped if the script is ending
    with an exception: a hook must not save, or meet other processes, while an error unwinds.

    Args:
        run: the state of the run; replaced for a new run.
        dispatch: the callbacks.
        window: the gradient window.
        models: the prepared models, as a list that grows.
        optimizers: the prepared optimizers, likewise.

    Attributes:
        active: loaders being iterated, the innermost last.
        worked: the current training batch was trained on.
        stepped: optimizers that stepped since the global step was last counted.
        deliveries: training loaders that moved on since the last micro-batch began.
        left_open: what is fired by the next thing that the script does.
        saves: what saves the training state, also in the background.
        stages: the evaluations that are open, the innermost last.
        loaders_seen: which prepared loaders were used for what.
        stop_is_old: the run's stop ended a training that is over, and is none for another.
        half_loaded: the checkpoint whose loading broke off after it had changed something.

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
    ) -> None:
        self.run = run
        self.dispatch = dispatch
        self.window = window
        self.models = models
        self.optimizers = optimizers
        self.model: torch.nn.Module | None = None
        self.active: list[DataLoaderShard] = []
        self.deliveries = Deliveries()
        self.left_open: list[Callable[[], None]] = []
        self.saves = BackgroundSaves(self.fire)
        self.stages: list[str] = []
        self.loaders_seen = LoadersSeen()
        self.told_no_saver = False
        self.eval_loaders = 0
        self.last_loss: torch.Tensor | None = None
        self.half_loaded: str | None = None
        self.worked = False
        self.epochs_counted = self.stop_is_old = False
        self.stepped: set[int] = set()
        self._outer: DataLoaderShard | None = None
        self._cut_short = self._passed = False
        self._settling = self._fit_started = self._train_started = False
        self._untorn: list[Callable[..., None]] | None = None  # whose teardown has still to come

    @property
    def phase(self) -> str:
        """``"train"``, ``"validation"`` or ``"test"``: what iterating a loader would count as."""
        if self.stages:
            return self.stages[-1]
        training = not self.models or any(model.training for model in self.models)
        return "train" if training else "validation"

    @property
    def evaluating(self) -> int:
        """How many evaluations are open."""
        return len(self.stages)

    @property
    def fitting(self) -> bool:
        """Between ``setup`` and ``teardown``."""
        return self._fit_started

    @property
    def between_passes(self) -> bool:
        """Prepared loaders are used, and none is being iterated now."""
        return self._passed and not self.active

    def fire(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks with the run and the model in front."""
        for method in self.dispatch.hooks[hook]:
            method(self.run, self.model, *args)

    def settle(self) -> None:
        """Fire what a broken-off loop left open."""
        if self._settling:  # a hook saves, say: what comes after it must stay after it
            return
        self._settling = True
        try:
            while self.left_open:
                self.left_open.pop(0)()
        finally:
            self._settling = False

    # --- the life of a run --------------------------------------------------------------------

    def begin_fit(self, restore: Callable[[], None] | None = None) -> None:
        """``setup``, the restoring of a checkpoint, ``on_fit_start``; once a run."""
        if self._fit_started:
            return
        self._fit_started, self.stop_is_old = True, False
        self.fire("setup", "fit")
        if restore is not None:
            restore()
        self.fire("on_fit_start")

    def begin_training(self) -> None:
        """``on_train_start``, once a run, before the first training batch."""
        self.begin_fit()
        if not self._train_started:
            self._train_started = True
            self.fire("on_train_start")

    def end_fit(self, error: BaseException | None = None) -> None:
        """The end of a run, well or with an error; an error of an end hook is one too."""
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
        """The hooks of a run that ends well; where one raises, the run is not over yet."""
        if self._fit_started:
            self.settle()
            if self._train_started:
                self.fire("on_train_end")
        self.saves.wait()
        if not self._fit_started:
            return
        self.fire("on_fit_end")
        self._untorn = left = list(self.dispatch.hooks["teardown"])
        while left:
            left.pop(0)(self.run, self.model, "fit")
        self._reset()

    def fail_fit(self, error: BaseException) -> None:
        """The hooks of a run that ends with an error."""
        self.run.interrupted = isinstance(error, KeyboardInterrupt)
        if self._fit_started:
            hooks, left = self.dispatch.hooks, self._untorn
            self._call_safely(hooks["on_exception"], error)
            self._call_safely(hooks["teardown"] if left is None else left, "fit")
            self._reset()
        self.saves.abandon()

    def _call_safely(self, methods: Sequence[Callable[..., None]], *args: Any) -> None:
        """Call hooks while an error unwinds: a second error is shown, and hides nothing."""
        for method in methods:
            try:
                method(self.run, self.model, *args)
            except Exception:
                traceback.print_exc()

    def _reset(self) -> None:
        """Forget the run that was, so that another can begin."""
        self._fit_started = self._train_started = self.epochs_counted = False
        self._untorn, self.stop_is_old = None, self.run.should_stop
        self._drop_passes()

    def forget(self) -> None:
        """What was prepared is gone: drop what belongs to it, without any hook."""
        self._drop_passes()
        self.window.close()
        self.model = self.last_loss = self.half_loaded = None
        self.loaders_seen.forget()
        self.window.normalizer.forget()
        self.window.dirty = self._passed = False

    def _drop_passes(self) -> None:
        """No loop is open any more."""
        self._cut_short = False
        for group in (self.left_open, self.active, self.deliveries, self.stepped, self.stages):
            group.clear()
        self._outer = None
        if not self.run.awaits_training:  # else the open window is that of the checkpoint
            self.window.abandon()

    # --- epochs -------------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Count epochs; see ``TrainingRun.epochs``."""
        return counted_epochs(self, total)

    def end_epoch(self, epoch: int, *, counted: bool) -> None:
        """``on_train_epoch_end``, and whether the epoch counts as done."""
        # An epoch that a stop cut short is not done: a resume goes on inside of it. A callback may
        # have taken the stop back meanwhile.
        cut_short, self._cut_short = self._cut_short, False
        if not (cut_short and self.run.should_stop):
            self.run.epoch_open = False
            self.run.epochs_done = epoch + 1
            if counted:
                self.run.first_epoch = epoch + 1
        self.fire("on_train_epoch_end")

    def open_plain_epoch(self, epoch: int) -> None:
        """In a loop without ``run.epochs``, a pass over the training data is an epoch."""
        if not self.epochs_counted and not self.run.epoch_open:
            self.run.current_epoch = epoch
            self.open_epoch(counted=False)

    def open_epoch(self, *, counted: bool) -> None:
        """``on_train_epoch_start``, and the loaders begin an epoch."""
        self.run.epoch_open = True
        for loader in self.run.accelerator.loaders:
            loader.begin_epoch(counted=counted)
        self.fire("on_train_epoch_start")

    def close_plain_epoch(self, epoch: int) -> None:
        """The pass is over; its end is fired when the script goes on."""
        if not self.epochs_counted and self.run.epoch_open:
            self.left_open.append(lambda: self.end_epoch(epoch, counted=False))

    # --- iteration ----------------------------------------------------------------------------

    def iterate(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Iterate a prepared loader, as training, as data inside of training, or as validation."""
        self.settle()
        if self.phase != "train":
            yield from evaluation_pass(self, loader)
        elif self._outer is not None and self._outer is not loader:
            yield from feeding_pass(self, loader)
        else:
            yield from training_pass(self, loader)

    def enter(self, loader: DataLoaderShard, *, outer: bool) -> int:
        """A pass begins; returns its number, which :meth:`leave` takes."""
        if loader in self.active:  # of an iterator that was kept and not read to its end
            self.active.remove(loader)
        self.active.append(loader)
        self._passed = True
        if outer:
            self._outer = self.loaders_seen.training = loader
        loader.passes += 1
        return loader.passes

    def leave(self, loader: DataLoaderShard, token: int) -> bool:
        """A pass is over; False if a newer pass over the same loader has taken its place."""
        if loader.passes != token:
            return False
        if self._outer is loader:
            self._outer = None
            self.window.leave_loader()
        if loader in self.active:
            self.active.remove(loader)
        return True

    def stop_pass(self, loader: DataLoaderShard) -> None:
        """The run stops after this batch; unless it was the last, its epoch is cut short."""
        self._cut_short = not loader.on_last
        if loader.on_last:
            loader.end_pass()

    # --- the step -----------------------------------------------------------------------------

    def begin_batch(self, loader: DataLoaderShard) -> None:
        """A training batch of the outer loader is delivered; nothing was done with it yet."""
        self.worked, self.last_loss = False, None
        self.stepped.clear()
        self.deliveries.note(loader)

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer step; optimizers that take turns in one batch count as one."""
        stepped, own = self.stepped, id(optimizer)
        if not stepped or own in stepped:
            stepped.clear()
            self.run.global_step += 1
        stepped.add(own)

    def drop_gradients(self) -> None:
        """Clear what a window gathered that was left before its end."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.window.normalizer.forget()
        self.window.dirty = False
