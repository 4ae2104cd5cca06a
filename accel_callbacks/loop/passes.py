"""Epochs, and passes over loaders: training, evaluation, and data inside of training."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Iterator
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
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.run import length_of
from accel_callbacks.loop.step_boundary import StepBoundary
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.undecided_pass import UndecidedPass

__all__ = ["Passes"]

# Instructions by which a generator gets the items of another one: `for`, and `yield from`.
_PASSES_ON = {opmap.get(name) for name in ("FOR_ITER", "SEND", "YIELD_FROM")}


class Passes:
    """Iterates epochs and loaders, and fires the hooks around them.

    Prepared loaders call :meth:`iterate`; ``run.epochs`` calls :meth:`epochs`.

    Args:
        loop: the state of the loop.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> list(accel.passes.epochs(2))
        [0, 1]
    """

    def __init__(self, loop: Loop) -> None:
        self.boundary = StepBoundary(loop)
        self._loop = loop
        self._undecided: UndecidedPass | None = None  # of the first pass in eval mode
        loop.own_batches.connect(self._begin_own_batch, self._end_own_batch)
        loop.drain_votes = self.boundary.drain

    def iterate(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Iterate a prepared loader, as the phase of the loop says."""
        loop = self._loop
        loop.settle()
        if loop.phase != "train" and not loop.trains_in_eval_mode(loader):
            # Before anything was trained, a model in eval mode may be one of from_pretrained.
            fresh = not loop.stages and torch.is_grad_enabled() and loop.optimizers
            if fresh and loop.train_loader is None and not loop.run._global_step:
                # Imported here, because most models are in train mode.
                from accel_callbacks.loop.undecided_pass import UndecidedPass

                kinds = self._training_pass, self._evaluation_pass
                self._undecided = UndecidedPass(loop, *kinds)
                yield from self._undecided.iterate(loader)
            else:
                yield from self._evaluation_pass(loader)
        elif loop.outer is not None and loop.outer is not loader:
            yield from self._inner_pass(loader)
        else:
            yield from self._training_pass(loader)

    def epochs(self, total: int) -> Iterator[int]:
        """Count epochs up to ``total``, with their hooks; see ``TrainingRun.epochs``."""
        loop, run = self._loop, self._loop.run
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
        loop.epochs_counted = True
        try:
            for epoch in range(run.epochs_done, total):
                run.current_epoch = epoch
                if not run.epoch_open:
                    loop.open_epoch(counted=True)
                yield epoch
                if loop.pass_ends is not None:
                    loop.pass_ends.end()
                loop.settle()
                loop.end_epoch(epoch, counted=True)
                self.boundary.poll()
                self.boundary.vote()
                if run.should_stop:
                    return
                loop.keep_boundary()
        except GeneratorExit:
            if run.epoch_open:
                loop.deferred.append(lambda: loop.end_epoch(run.current_epoch, counted=True))
            raise
        finally:
            loop.epochs_counted = False

    def begin_evaluation(self, stage: str = "validation") -> None:
        """Fire ``on_validation_start`` and ``on_validation_epoch_start``, or those of a test."""
        loop = self._loop
        loop.settle()
        loop.begin_evaluation()
        loop.stages.append(stage)
        loop.eval_loaders = 0
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
        if loop.stages:
            loop.stages.pop()
        if not failed:
            loop.settle()
            self._fire_evaluation_end(stage)

    def _fire_evaluation_end(self, stage: str) -> None:
        self._loop.fire(f"on_{stage}_epoch_end")
        self._loop.fire(f"on_{stage}_end")

    def _training_pass(
        self, loader: DataLoaderShard, batches: Iterator[Any] | None = None
    ) -> Generator[Any, None, None]:
        """Iterate training data, with the hooks of batches, and of epochs in a plain loop.

        Args:
            loader: the data.
            batches: those that are left of a pass that has begun otherwise.
        """
        loop, run = self._loop, self._loop.run
        loop.withdraw_consumed_stop()
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

            batches = read_on(loader, loop)
        elif batches is None:
            batches = loader.batches()
        # A newer pass over this loader gets another token; then this one, when it is closed, leaves
        # the state of the loop alone.
        token = loop.enter(loader, outer=True)
        done, loader.done = loader.done, False
        loader.trained = True
        run.num_training_batches = length_of(loader)
        dispatch, saves = loop.dispatch, loop.saves
        # The dict stays the same object; its tuples are replaced when callbacks come and go.
        hooks = dispatch.hooks
        index, batch, peeked = -1, None, False
        end_batch = self._end_batch
        if loop.savers and not (begun or _is_iterated(sys._getframe())):
            loop.keep_random_after_steps()
            end_batch = self._end_asked_batch
        asked = perf_counter()
        try:
            for batch in batches:
                run.data_wait_s += perf_counter() - asked
                if not run.epoch_open:
                    loop.open_plain_epoch(loader.epoch)
                run.batch_idx = index = loader.batch_index
                # Hot path: every avoided call is measurable, because the work of the step has
                # pushed this code out of the cache. So the tests are inline.
                loop.worked, loop.last_loss = False, None
                if loop.unsettled:
                    loop.unsettled.append(None)
                else:
                    loop.stepped = ()
                if hooks["on_train_batch_start"]:
                    for hook in hooks["on_train_batch_start"]:
                        hook(run, loop.model, batch, index)
                    if run.votes.asked and self._ends_before_batch():
                        loader.end_pass()
                        break
                yield batch
                if dispatch.ends_batches or run.votes.asked or loop.deferred or saves.pending:
                    if end_batch(batch, index) and not run.should_stop:
                        loader.end_pass()
                        break
                else:
                    loop.worked = True
                    if dispatch.end_batch is not None:
                        dispatch.end_batch(run, batch)
                # Not through the property: this is the hot path.
                if run._stop_reason is not None and not loop.window.is_open:
                    loop.stop_pass(loader)
                    break
                asked = perf_counter()
        except GeneratorExit:
            # An iterator that was kept, while a newer pass over the loader goes on.
            if loader.passes != token:
                raise
            # `next(iter(loader))` before the loop is no epoch: the first batch is delivered again.
            peeked = loader.starts and not loop.worked and len(loop.optimizers) > 0
            if peeked:
                loader.undo_pass()
                loader.done = done
            else:
                loader.end_pass()
                if loop.worked:
                    loop.deferred.append(lambda: self._end_batch(batch, index))
            raise
        finally:
            if loop.leave(loader, token) and not peeked:
                if loop.pass_ends is not None:
                    loop.pass_ends.end()
                loader.done = loader.finished
                loop.close_plain_epoch(loader.epoch)
        loop.settle()
        if run.votes.pending and not loop.in_window:
            self.boundary.drain()
        # In another loop the epoch ends before its evaluation, which a resume would not repeat.
        if loop.epochs_counted and not loop.in_window and not run.should_stop:
            loop.keep_boundary()

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
        loop.withdraw_consumed_stop()
        loop.begin_training()
        loop.begin_own_batch()
        for hook in loop.dispatch.hooks["on_train_batch_start"]:
            hook(loop.run, loop.model, None, loop.run.batch_idx)

    def _end_own_batch(self) -> None:
        """Fire ``on_train_batch_end``, and vote."""
        loop = self._loop
        self._end_batch(None, loop.run.batch_idx)
        if loop.run.should_stop and not loop.window.is_open:
            loop.stop_after_own_batch()

    def _end_batch(self, batch: Any, index: int) -> bool:
        """Fire ``on_train_batch_end`` and vote; return whether the ranks end the epoch here."""
        loop = self._loop
        run = loop.run
        if loop.deferred:
            loop.settle()
        # Whatever the body did with the batch, it is done: a resume must not deliver it again.
        loop.worked = True
        if loop.saves.pending:
            self.boundary.poll()
        if loop.dispatch.end_batch is not None:
            loop.dispatch.end_batch(run, batch)
        hooks = loop.dispatch.hooks["on_train_batch_end"]
        if hooks:
            outputs = None if loop.last_loss is None else {"loss": loop.last_loss}
            for hook in hooks:
                hook(run, loop.model, outputs, batch, index)
        if loop.dispatch.can_vote or run.votes.asked:
            # A loop that was left, and one over data of its own, may have had its last boundary.
            return self.boundary.vote_within_epoch(last=loop.outer is None or loop.outer.on_last)
        return False

    def _end_asked_batch(self, batch: Any, index: int) -> bool:
        """End a batch in a loop that calls ``next``: its draws before that are of the next step."""
        loop = self._loop
        loop.random_at_stop = loop.random_after_step()
        try:
            return self._end_batch(batch, index)
        finally:
            loop.random_at_stop = None

    def _evaluation_pass(
        self, loader: DataLoaderShard, batches: Iterator[Any] | None = None
    ) -> Generator[Any, None, None]:
        """Iterate validation data; without ``evaluate`` around it, the pass is an evaluation.

        It is none from the first step of a prepared optimizer on: what is left trains.

        Args:
            loader: the data.
            batches: those of a pass that has begun; a new pass if ``None``.
        """
        loop = self._loop
        alone = not loop.evaluating
        if alone:
            self.begin_evaluation()
        stage = loop.stages[-1]
        # Lightning passes the loader's index only where there are several loaders.
        extra = (loop.eval_loaders,) if loop.eval_loaders else ()
        loop.eval_loaders += 1
        token = loop.enter(loader, outer=False)
        loop.used_loaders.add_evaluated(loader, stage)
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
            loop.leave(loader, token)
            if alone and loop.stages:
                loop.stages.pop()
                loop.deferred.append(partial(self._fire_evaluation_end, stage))
        loop.settle()
        if trains:
            loop.run.in_eval_mode = True
            warn(
                "the model is trained in eval mode, in which an evaluation has left it: its "
                "dropout is off, and the pass counted as an evaluation until its first step. Call "
                "model.train() before the loop over the training data, or evaluate inside of "
                "`with accel.evaluate(model):`, which restores the mode."
            )
            yield from self._training_pass(loader, batches)

    def _inner_pass(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Iterate a second loader inside of a training pass, without hooks."""
        loop = self._loop
        token = loop.enter(loader, outer=False)
        loader.trained = True
        try:
            yield from loader.batches()
        except GeneratorExit:
            if loader.passes == token:
                loader.end_pass()
            raise
        finally:
            loop.leave(loader, token)


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
