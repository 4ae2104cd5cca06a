"""Epochs, and passes over loaders: training, evaluation, and data inside of training."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from opcode import opmap
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.errors import NO_MODEL, ResumeError
from accel_callbacks.logging import notice
from accel_callbacks.loop.first_steps import FirstSteps
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.run import length_of
from accel_callbacks.loop.step_boundary import StepBoundary
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.checkpoint.training_state import TrainingState
    from accel_callbacks.loop.undecided_pass import UndecidedPass

__all__ = ["Passes"]

# Instructions by which a generator gets the items of another one: `for`, and `yield from`.
_PASSES_ON = {opmap.get(name) for name in ("FOR_ITER", "SEND", "YIELD_FROM")}


class Passes:
    """Iterates epochs and loaders, and fires the hooks around them.

    Prepared loaders call :meth:`iterate`; ``run.epochs`` calls :meth:`epochs`.

    Args:
        loop: the state of the loop.
        first_steps: checks at each training pass what models have got since they were prepared.
        training_state: returns what a checkpoint is made of; a loop that saves nothing does not
            ask for it.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> list(accel.passes.epochs(2))
        [0, 1]
    """

    def __init__(
        self, loop: Loop, first_steps: FirstSteps, training_state: Callable[[], TrainingState]
    ) -> None:
        self.boundary = StepBoundary(loop)
        self._loop = loop
        # Bound here, because the end of a batch is the hot path; they stay the same objects.
        self._step, self._deferred = loop.step, loop.position.deferred
        self._hooks = loop.dispatch.hooks
        self._first_steps = first_steps
        self._training_state = training_state
        self._undecided: UndecidedPass | None = None  # of the first pass in eval mode
        loop.own_batches.connect(self._begin_own_batch, self._end_own_batch)
        loop.boundary.drain_votes = self.boundary.drain

    def iterate(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Iterate a prepared loader, as the phase of the loop says."""
        loop, position = self._loop, self._loop.position
        loop.settle()
        if loop.phase != "train" and not loop.trains_in_eval_mode(loader):
            # Before anything was trained, a model in eval mode may be one of from_pretrained.
            fresh = not position.stages and torch.is_grad_enabled() and loop.optimizers
            if fresh and loop.train_loader is None and not loop.run._global_step:
                # Imported here, because most models are in train mode.
                from accel_callbacks.loop.undecided_pass import UndecidedPass

                kinds = self._iterate_training, self._iterate_evaluation
                self._undecided = UndecidedPass(loop, *kinds)
                yield from self._undecided.iterate(loader)
            else:
                yield from self._iterate_evaluation(loader)
        elif position.outer is not None and position.outer is not loader:
            yield from self._iterate_inside(loader)
        else:
            yield from self._iterate_training(loader)

    # --- epochs -------------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Count epochs up to ``total``, with their hooks; see ``TrainingRun.epochs``."""
        loop, run, position = self._loop, self._loop.run, self._loop.position
        loop.settle()
        run.max_epochs = total
        # Passes before the first call, such as a warm-up, do not count as epochs.
        run.epochs_done = run.first_epoch
        # Before the question whether anything is left: a signal may have come during the start,
        # and a rank that leaves here alone would leave the others in their first collective.
        self.boundary.vote()
        if run.epochs_done >= total:
            if run.resumed_without_model:
                raise ResumeError(NO_MODEL.format(run.resumed_from))
            done = "1 epoch is" if run.epochs_done == 1 else f"{run.epochs_done} epochs are"
            notice(f"nothing left to do: {done} done")
        if run.should_stop or run.epochs_done >= total:
            return
        loop.begin_training()
        position.epochs_counted = True
        try:
            for epoch in range(run.epochs_done, total):
                run.current_epoch = epoch
                if not run.epoch_open:
                    self._open_epoch(counted=True)
                yield epoch
                if loop.pass_ends is not None:
                    loop.pass_ends.end()
                loop.settle()
                self._end_epoch(epoch, counted=True)
                self.boundary.poll()
                self.boundary.vote()
                if run.should_stop:
                    return
                loop.boundary.keep()
        except GeneratorExit:
            if run.epoch_open:
                position.deferred.append(lambda: self._end_epoch(run.current_epoch, counted=True))
            raise
        finally:
            position.epochs_counted = False

    def _open_epoch(self, *, counted: bool) -> None:
        """Start an epoch of the loaders, and fire ``on_train_epoch_start``."""
        loop = self._loop
        loop.run.epoch_open, loop.run.batch_idx = True, -1
        loop.flags.warming_up = False
        for loader in loop.loaders:
            loader.begin_epoch(counted=counted)
        loop.fire("on_train_epoch_start")

    def _end_epoch(self, epoch: int, *, counted: bool) -> None:
        """Fire ``on_train_epoch_end``; count the epoch as done unless a stop cut it short."""
        loop, run, position = self._loop, self._loop.run, self._loop.position
        # A resume continues inside of an epoch that was cut short. A callback may have withdrawn
        # the stop meanwhile; then the epoch is done after all.
        cut_short, position.cut_short = position.cut_short, False
        if not (cut_short and run.should_stop):
            run.epoch_open = False
            run.epochs_done = epoch + 1
            if counted:
                run.first_epoch = epoch + 1
        if loop.savers:  # which may wait for counted steps, and save only once the run is over
            from accel_callbacks.checkpoint.trained_parameters import require_prepared_steps

            require_prepared_steps(self._training_state())
        loop.fire("on_train_epoch_end")

    def _open_plain_epoch(self, epoch: int) -> None:
        """Start an epoch at the first batch of a pass, in a loop without ``run.epochs``."""
        run = self._loop.run
        # A resume in the middle of an epoch continues it: on_train_epoch_start has fired before.
        if not self._loop.epochs_counted and not run.epoch_open:
            run.current_epoch = epoch
            self._open_epoch(counted=False)

    def _end_plain_epoch(self, epoch: int) -> None:
        """End an epoch that the script counts itself, and that a resumed pass has left behind."""
        run = self._loop.run
        if run.epoch_open and not self._loop.epochs_counted:
            self._end_epoch(epoch, counted=False)

    # --- evaluations --------------------------------------------------------------------------

    def begin_evaluation(self, stage: str = "validation") -> None:
        """Fire ``on_validation_start`` and ``on_validation_epoch_start``, or those of a test."""
        loop, position = self._loop, self._loop.position
        loop.settle()
        loop.begin_evaluation()
        position.stages.append(stage)
        position.eval_loaders = 0
        try:
            loop.fire(f"on_{stage}_start")
            loop.fire(f"on_{stage}_epoch_start")
        except BaseException:
            # The block is not entered, so its __exit__ will not run.
            self.end_evaluation(stage, failed=True)
            raise

    def end_evaluation(self, stage: str, *, failed: bool = False) -> None:
        """Fire ``on_validation_epoch_end`` and ``on_validation_end``, unless an error unwinds."""
        loop = self._loop
        # The run may have ended inside of the block.
        if loop.position.stages:
            loop.position.stages.pop()
        if not failed:
            loop.settle()
            self._fire_evaluation_end(stage)

    def _fire_evaluation_end(self, stage: str) -> None:
        """Fire the hooks at the end of an evaluation."""
        self._loop.fire(f"on_{stage}_epoch_end")
        self._loop.fire(f"on_{stage}_end")

    # --- passes -------------------------------------------------------------------------------

    def _leave(self, loader: DataLoaderShard, token: int) -> bool:
        """End a pass; return False if a newer pass over the same loader has replaced it."""
        loop = self._loop
        trained = loop.position.outer is loader
        if not loop.position.leave(loader, token):
            return False
        if trained:
            loop.step.after_step = loop.own_batches.note_call
            loop.window.leave_loader()
        return True

    def _enter_training(self, loader: DataLoaderShard) -> int:
        """Start a training pass; return its number, for :meth:`_leave`."""
        loop, position = self._loop, self._loop.position
        token = position.enter(loader)
        # Optimizers that step in a pass end no batch of their own.
        position.random_at_stop = position.random_after_step = loop.step.after_step = None
        position.outer = position.used_loaders.training = loader
        loop.own_batches.drop()  # its data comes from this loader
        self._first_steps.added_parameters.check()
        loop.flags.warming_up = False
        return token

    def _iterate_training(
        self, loader: DataLoaderShard, batches: Iterator[Any] | None = None
    ) -> Generator[Any, None, None]:
        """Iterate training data, with the hooks of batches, and of epochs in a plain loop.

        Args:
            loader: the data.
            batches: those that are left of a pass that has begun otherwise.
        """
        loop, run = self._loop, self._loop.run
        loop.flags.withdraw_consumed_stop(run)
        if run.votes.pending and not loop.in_window:  # the pass before was left by `break`
            self.boundary.drain()
        if run.should_stop:
            return
        loop.begin_training()
        if loop.pass_ends is not None:
            loop.pass_ends.begin()
        run.votes.withdraw("end_epoch")  # of the epoch before, whose end came first
        begun = batches is not None
        if loader.continues and batches is None:
            # Imported here, because most passes begin at their start.
            from accel_callbacks.loop.resumed_pass import read_on

            batches = read_on(loader, loop, self._end_plain_epoch)
        elif batches is None:
            batches = loader.batches()
        # A newer pass over this loader gets another token; then this one, when it is closed, leaves
        # the state of the loop alone.
        token = self._enter_training(loader)
        done, loader.done = loader.done, False
        loader.trained = True
        run.num_training_batches = length_of(loader)
        # Bound once: the records, the list and the table of hooks stay the same objects.
        step, window, deferred = loop.step, loop.window, loop.position.deferred
        dispatch, saves = loop.dispatch, loop.saves
        hooks = dispatch.hooks
        index, batch, peeked = -1, None, False
        end_batch = self._end_batch
        if loop.savers and not (begun or _is_iterated(sys._getframe())):
            self._keep_random_after_steps()
            end_batch = self._end_asked_batch
        asked = perf_counter()
        try:
            for batch in batches:
                run.data_wait_s += perf_counter() - asked
                if not run.epoch_open:
                    self._open_plain_epoch(loader.epoch)
                run.batch_idx = index = loader.batch_index
                # Hot path: every avoided call is measurable, because the work of the step has
                # pushed this code out of the cache. So the tests are inline.
                step.worked, step.last_loss = False, None
                # Steps of the batch before may still wait for the device: those of this batch are
                # told apart from them by a mark.
                if step.unsettled:
                    step.unsettled.append(None)
                else:
                    step.stepped = ()
                if hooks["on_train_batch_start"]:
                    for hook in hooks["on_train_batch_start"]:
                        hook(run, loop.model, batch, index)
                    if run.votes.asked and self._ends_before_batch():
                        loader.end_pass()
                        break
                yield batch
                if dispatch.ends_batches or run.votes.asked or deferred or saves.pending:
                    if end_batch(batch, index) and not run.should_stop:
                        loader.end_pass()
                        break
                else:
                    step.worked = True
                    if dispatch.end_batch is not None:
                        dispatch.end_batch(run, batch)
                # Not through the property: this is the hot path.
                if run._stop_reason is not None and not window.is_open:
                    self._stop_pass(loader)
                    break
                asked = perf_counter()
        except GeneratorExit:
            # An iterator that was kept, while a newer pass over the loader goes on.
            if loader.passes != token:
                raise
            # `next(iter(loader))` before the loop is no epoch: the first batch is delivered again.
            peeked = loader.starts and not step.worked and len(loop.optimizers) > 0
            if peeked:
                # Its epoch stays open, without `on_train_epoch_end`.
                loader.undo_pass()
                loader.done = done
            else:
                loader.end_pass()
                if step.worked:
                    deferred.append(lambda: self._end_batch(batch, index))
            raise
        finally:
            if self._leave(loader, token) and not peeked:
                if loop.pass_ends is not None:
                    loop.pass_ends.end()
                loader.done = loader.finished
                # Code after the loop, such as an evaluation, still belongs to the epoch for the
                # user: hooks at its end fire when the script calls the library again.
                if run.epoch_open and not loop.epochs_counted:
                    epoch = loader.epoch
                    deferred.append(lambda: self._end_epoch(epoch, counted=False))
        loop.settle()
        if run.votes.pending and not loop.in_window:
            self.boundary.drain()
        # In another loop the epoch ends before its evaluation, which a resume would not repeat.
        if loop.epochs_counted and not loop.in_window and not run.should_stop:
            loop.boundary.keep()

    def _ends_before_batch(self) -> bool:
        """Return whether the batch that was announced is left out, with the rest of its epoch."""
        votes = self._loop.run.votes
        # With several ranks the request waits for the vote, which comes after the step.
        alone = collectives.world_size() == 1 and not self._loop.in_window
        if "end_epoch" not in votes.asked or not alone:
            return False
        votes.withdraw("end_epoch")
        return True

    def _begin_own_batch(self) -> None:
        """Fire ``on_train_batch_start`` in a loop that iterates no prepared loader."""
        loop = self._loop
        if self._undecided is not None and self._undecided.begin_training():
            return
        loop.settle()
        run, step, position = loop.run, loop.step, loop.position
        loop.flags.withdraw_consumed_stop(run)
        loop.begin_training()
        step.worked, step.last_loss = False, None
        # A loop over data of its own that goes on after a stop is not cut short by it.
        position.cut_short, position.ignores_stop = False, run.should_stop
        run.num_training_batches = float("inf")
        run.batch_idx += 1
        for hook in loop.dispatch.hooks["on_train_batch_start"]:
            hook(run, loop.model, None, run.batch_idx)

    def _end_own_batch(self) -> None:
        """Fire ``on_train_batch_end``, and vote."""
        loop, position = self._loop, self._loop.position
        self._end_batch(None, loop.run.batch_idx)
        if loop.run.should_stop and not loop.window.is_open:
            # The epoch is cut short, unless the loop over its data is over anyway.
            ended = loop.flags.settling or position.ignores_stop
            position.cut_short = loop.run.epoch_open and not ended
            self._keep_random()

    def _end_batch(self, batch: Any, index: int) -> bool:
        """Fire ``on_train_batch_end`` and vote; return whether the ranks end the epoch here."""
        loop, step = self._loop, self._step
        run = loop.run
        if self._deferred:
            loop.settle()
        # Whatever the body did with the batch, it is done: a resume must not deliver it again.
        step.worked = True
        if loop.saves.pending:
            self.boundary.poll()
        if loop.dispatch.end_batch is not None:
            loop.dispatch.end_batch(run, batch)
        hooks = self._hooks["on_train_batch_end"]
        if hooks:
            outputs = None if step.last_loss is None else {"loss": step.last_loss}
            for hook in hooks:
                hook(run, loop.model, outputs, batch, index)
        if loop.dispatch.can_vote or run.votes.asked:
            outer = loop.position.outer
            # A loop that was left, and one over data of its own, may have had its last boundary.
            return self.boundary.vote_within_epoch(last=outer is None or outer.on_last)
        return False

    # --- a stop within an epoch, and the random generators there ------------------------------

    def _stop_pass(self, loader: DataLoaderShard) -> None:
        """Stop after this batch; unless it was the last, the epoch is cut short."""
        self._loop.position.cut_short = not loader.on_last
        if loader.on_last:
            loader.end_pass()
        self._keep_random()

    def _keep_random(self) -> None:
        """Keep the state of random generators where an epoch is cut short.

        A resume goes on there, and what the script draws from now on, such as in an evaluation, is
        drawn in the unbroken run only after the rest of the epoch.
        """
        if self._loop.position.cut_short:
            kept = self._random_after_step()
            self._loop.position.random_at_stop = kept or self._training_state().random_state()

    def _keep_random_after_steps(self) -> None:
        """Keep the state of random generators after each step of this pass."""
        loop = self._loop

        def keep(optimizer: Any) -> None:
            random_state = self._training_state().random_state()
            loop.position.random_after_step = loop.run.batch_idx, random_state

        loop.step.after_step = keep

    def _random_after_step(self) -> Any:
        """Return the state of random generators after the step of this batch, if it is kept."""
        kept = self._loop.position.random_after_step
        return kept[1] if kept is not None and kept[0] == self._loop.run.batch_idx else None

    def _end_asked_batch(self, batch: Any, index: int) -> bool:
        """End a batch in a loop that calls ``next``: its draws before that are of the next step."""
        position = self._loop.position
        position.random_at_stop = self._random_after_step()
        try:
            return self._end_batch(batch, index)
        finally:
            position.random_at_stop = None

    # --- evaluations, and data inside of training ---------------------------------------------

    def _iterate_evaluation(
        self, loader: DataLoaderShard, batches: Iterator[Any] | None = None
    ) -> Generator[Any, None, None]:
        """Iterate validation data; without ``evaluate`` around it, the pass is an evaluation.

        It is none from the first step of a prepared optimizer on: what is left trains.

        Args:
            loader: the data.
            batches: those of a pass that has begun; a new pass if ``None``.
        """
        loop, position = self._loop, self._loop.position
        alone = not loop.evaluating
        if alone:
            self.begin_evaluation()
        stage = position.stages[-1]
        # Lightning passes the loader's index only where there are several loaders.
        extra = (position.eval_loaders,) if position.eval_loaders else ()
        position.eval_loaders += 1
        token = position.enter(loader)
        position.used_loaders.add_evaluated(loader, stage)
        loader.trained = False
        steps, trains = loop.run._global_step, False
        batches = loader.batches() if batches is None else batches
        hooks = loop.dispatch.hooks
        start, end = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        try:
            if loop.local_metrics is not None:
                loop.local_metrics.compare()  # of the evaluation before
            for batch in batches:
                index = loader.batch_index
                for hook in hooks[start]:
                    hook(loop.run, loop.model, batch, index, *extra)
                yield batch
                for hook in hooks[end]:
                    hook(loop.run, loop.model, None, batch, index, *extra)
                if alone and loop.run._global_step != steps:
                    trains = True
                    break
            if loop.local_metrics is not None:
                loop.local_metrics.end_evaluation()
        finally:
            self._leave(loader, token)
            if alone and position.stages:
                position.stages.pop()
                position.deferred.append(partial(self._fire_evaluation_end, stage))
        loop.settle()
        if trains:
            loop.run.in_eval_mode = True
            warn(
                "the model is trained in eval mode, in which an evaluation has left it: its "
                "dropout is off, and the pass counted as an evaluation until its first step. Call "
                "model.train() before the loop over the training data, or evaluate inside of "
                "`with accel.evaluate(model):`, which restores the mode."
            )
            yield from self._iterate_training(loader, batches)

    def _iterate_inside(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Iterate a second loader inside of a training pass, without hooks."""
        token = self._loop.position.enter(loader)
        loader.trained = True
        try:
            yield from loader.batches()
        except GeneratorExit:
            if loader.passes == token:
                loader.end_pass()
            raise
        finally:
            self._leave(loader, token)


def _is_iterated(frame: FrameType | None) -> bool:
    """Return whether a generator is read by a ``for``, and not by calls of ``next``.

    Args:
        frame: of the generator. Generators that pass its items on may be around it, and objects
            with ``__next__``.
    """
    while frame := frame.f_back if frame is not None else None:
        code = frame.f_code
        asks = code.co_code[frame.f_lasti]
        if code.co_name != "__next__" and (
            asks not in _PASSES_ON or not code.co_flags & inspect.CO_GENERATOR
        ):
            return asks == opmap["FOR_ITER"]
    return True
