"""The loop's events: hooks fire from the calls that a plain loop makes anyway."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel_callbacks.accumulation import GradientWindow
from accel_callbacks.callbacks.dispatch import Dispatcher
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.run import TrainingRun

__all__ = ["Loop"]


class Loop:
    """Knows which loader is being iterated and in which phase, and fires the hooks around it.

    What a loop leaves open when it is broken off (the end of the last batch, the end of an
    evaluation) is fired by the next thing the script does, and dropped if the script is ending
    with an exception: a hook must not save, or meet other processes, while an error unwinds.

    Args:
        run: the state of the run; replaced for a new run.
        dispatch: the callbacks.
        window: the gradient window.
        is_training: whether the prepared models are in training mode.

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
        is_training: Callable[[], bool],
    ) -> None:
        self.run = run
        self.dispatch = dispatch
        self.window = window
        self.model: torch.nn.Module | None = None
        self.active: list[DataLoaderShard] = []
        self.evaluating = 0
        self.last_loss: torch.Tensor | None = None
        self.worked = False
        self._is_training = is_training
        self._outer: DataLoaderShard | None = None
        self._epochs_counted = False
        self._cut_short = False
        self._eval_loaders = 0
        self._left_open: list[Callable[[], None]] = []
        self._settling = self._fit_started = self._train_started = False

    @property
    def phase(self) -> str:
        """``"train"`` or ``"validation"``: what iterating a loader now would count as."""
        if self.evaluating:
            return "validation"
        return "train" if self._is_training() else "validation"

    def fire(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks with the run and the model in front."""
        for method in self.dispatch[hook]:
            method(self.run, self.model, *args)

    def settle(self) -> None:
        """Fire what a broken-off loop left open."""
        if self._settling:  # a hook saves, say: what comes after it must stay after it
            return
        self._settling = True
        try:
            while self._left_open:
                self._left_open.pop(0)()
        finally:
            self._settling = False

    # --- the life of a run --------------------------------------------------------------------

    def begin_fit(self, restore: Callable[[], None] | None = None) -> None:
        """``setup``, the restoring of a checkpoint, ``on_fit_start``; once a run."""
        if self._fit_started:
            return
        self._fit_started = True
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
        """The end of a run, well or with an error."""
        if not self._fit_started:
            return
        if error is None:
            self.settle()
            if self._train_started:
                self.fire("on_train_end")
            self.fire("on_fit_end")
            self.fire("teardown", "fit")
        else:
            self._fire_safely("on_exception", error)
            self._fire_safely("teardown", "fit")
        self.reset()

    def _fire_safely(self, hook: str, *args: Any) -> None:
        """Call a hook while an error unwinds: a second error is shown, and hides nothing."""
        for method in self.dispatch[hook]:
            try:
                method(self.run, self.model, *args)
            except Exception:
                traceback.print_exc()

    def reset(self) -> None:
        """Forget the run that was, so that another can begin."""
        self._fit_started = self._train_started = self._epochs_counted = False
        self._cut_short = False
        self._left_open.clear()
        self.active.clear()
        self._outer = None
        self.evaluating = 0
        self.window.close()

    def epochs(self, total: int) -> Iterator[int]:
        """Count epochs; see ``TrainingRun.epochs``."""
        run = self.run
        run.max_epochs = total
        if run.epochs_done >= total:
            run.accelerator._notice(f"nothing left to do: {run.epochs_done} epochs are done")
            return
        self.begin_training()
        self._epochs_counted = True
        try:
            for epoch in range(run.epochs_done, total):
                run.current_epoch = epoch
                if not run.epoch_open:
                    run.epoch_open = True
                    self.fire("on_train_epoch_start")
                yield epoch
                self.settle()
                self._end_epoch(epoch)
                run.agree()
                if run.should_stop:
                    return
        except GeneratorExit:
            if run.epoch_open:
                self._left_open.append(lambda: self._end_epoch(run.current_epoch))
            raise
        finally:
            self._epochs_counted = False

    def _end_epoch(self, epoch: int) -> None:
        # An epoch that a stop cut short is not done: a resume goes on inside of it.
        if not self._cut_short:
            self.run.epoch_open = False
            self.run.epochs_done = epoch + 1
        self.fire("on_train_epoch_end")

    # --- iteration ----------------------------------------------------------------------------

    def iterate(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Iterate a prepared loader, as training or as validation."""
        self.settle()
        if self.phase == "validation":
            yield from self._evaluate(loader)
        elif self._outer is not None:
            yield from self._feed(loader)  # a second loader in a training loop: data, no hooks
        else:
            yield from self._train(loader)

    def _feed(self, loader: DataLoaderShard) -> Iterator[Any]:
        self.active.append(loader)
        loader.trained = True
        try:
            yield from loader.batches()
        except GeneratorExit:
            loader.end_pass()
            raise
        finally:
            self._forget(loader)

    def _train(self, loader: DataLoaderShard) -> Iterator[Any]:
        run = self.run
        if run.should_stop:
            return
        self.begin_training()
        self._outer = loader
        loader.trained = True
        self.active.append(loader)
        run.num_training_batches = _length(loader)
        start_hooks = self.dispatch["on_train_batch_start"]
        index, batch = -1, None
        try:
            for batch in loader.batches():
                if not self._epochs_counted:
                    self._open_plain_epoch(loader.epoch)
                run.batch_idx = index = loader.batch_index
                self.worked, self.last_loss = False, None
                for hook in start_hooks:
                    hook(run, self.model, batch, index)
                yield batch
                self._end_train_batch(batch, index)
                if run.should_stop:
                    self._cut_short = not loader.on_last
                    if loader.on_last:
                        loader.end_pass()
                    break
        except GeneratorExit:
            loader.end_pass()
            if self.worked:
                self._left_open.append(lambda: self._end_train_batch(batch, index))
            raise
        finally:
            self._forget(loader)
            self.window.close()
            if not self._epochs_counted and run.epoch_open:
                self._left_open.append(lambda: self._end_epoch(loader.epoch))
        self.settle()

    def _open_plain_epoch(self, epoch: int) -> None:
        """In a loop without ``run.epochs``, a pass over the training data is an epoch."""
        if not self.run.epoch_open:
            self.run.current_epoch = epoch
            self.run.epoch_open = True
            self.fire("on_train_epoch_start")

    def _end_train_batch(self, batch: Any, index: int) -> None:
        if self._left_open:
            self.settle()
        hooks = self.dispatch["on_train_batch_end"]
        if hooks:
            outputs = None if self.last_loss is None else {"loss": self.last_loss.detach()}
            for hook in hooks:
                hook(self.run, self.model, outputs, batch, index)
        if self.dispatch.can_vote and not self.window.is_open:
            self.run.agree()

    def _forget(self, loader: DataLoaderShard) -> None:
        if self._outer is loader:
            self._outer = None
        if loader in self.active:
            self.active.remove(loader)

    # --- evaluation ---------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """``on_validation_start`` and ``on_validation_epoch_start``."""
        self.settle()
        self.begin_fit()
        self.evaluating += 1
        self._eval_loaders = 0
        self.fire("on_validation_start")
        self.fire("on_validation_epoch_start")

    def end_evaluation(self, *, failed: bool = False) -> None:
        """``on_validation_epoch_end`` and ``on_validation_end``, unless an error unwinds."""
        self.evaluating -= 1
        if failed:
            return
        self.settle()
        self.fire("on_validation_epoch_end")
        self.fire("on_validation_end")

    def _evaluate(self, loader: DataLoaderShard) -> Iterator[Any]:
        alone = not self.evaluating
        if alone:
            self.begin_evaluation()
        # Lightning passes the loader's index only where there are several loaders.
        extra = (self._eval_loaders,) if self._eval_loaders else ()
        self._eval_loaders += 1
        loader.trained = False
        self.active.append(loader)
        start_hooks = self.dispatch["on_validation_batch_start"]
        end_hooks = self.dispatch["on_validation_batch_end"]
        try:
            for batch in loader.batches():
                index = loader.batch_index
                for hook in start_hooks:
                    hook(self.run, self.model, batch, index, *extra)
                yield batch
                for hook in end_hooks:
                    hook(self.run, self.model, None, batch, index, *extra)
        finally:
            self._forget(loader)
            if alone and self.evaluating:
                self.evaluating -= 1
                self._left_open.append(self._end_plain_evaluation)
        self.settle()

    def _end_plain_evaluation(self) -> None:
        self.fire("on_validation_epoch_end")
        self.fire("on_validation_end")


def _length(loader: DataLoaderShard) -> int | float:
    try:
        return len(loader)
    except TypeError:
        return float("inf")
