"""One pass over a loader: as training, as evaluation, as a second loader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.loop.run import length_of
from accel_callbacks.loop.step_boundary import poll, vote, vote_within

if TYPE_CHECKING:
    from accel_callbacks.loop.loop import Loop

__all__ = [
    "begin_evaluation",
    "counted_epochs",
    "end_evaluation",
    "evaluation_pass",
    "feeding_pass",
    "training_pass",
]


def begin_evaluation(loop: Loop, stage: str = "validation") -> None:
    """``on_validation_start`` and ``on_validation_epoch_start``, or those of a test."""
    loop.settle()
    loop.begin_fit()
    loop.stages.append(stage)
    loop.eval_loaders = 0
    try:
        loop.fire(f"on_{stage}_start")
        loop.fire(f"on_{stage}_epoch_start")
    except BaseException:  # the block is not entered, so that nobody leaves it
        end_evaluation(loop, stage, failed=True)
        raise


def end_evaluation(loop: Loop, stage: str, *, failed: bool = False) -> None:
    """``on_validation_epoch_end`` and ``on_validation_end``, unless an error unwinds."""
    if loop.stages:  # else the run has ended inside of it
        loop.stages.pop()
    if not failed:
        loop.settle()
        _fire_end(loop, stage)


def _fire_end(loop: Loop, stage: str) -> None:
    loop.fire(f"on_{stage}_epoch_end")
    loop.fire(f"on_{stage}_end")


def evaluation_pass(loop: Loop, loader: DataLoaderShard) -> Iterator[Any]:
    """One pass over validation data; in a plain loop it is an evaluation of its own."""
    alone = not loop.evaluating
    if alone:
        begin_evaluation(loop)
    stage = loop.stages[-1]
    # Lightning passes the loader's index only where there are several loaders.
    extra = (loop.eval_loaders,) if loop.eval_loaders else ()
    loop.eval_loaders += 1
    token = loop.enter(loader, outer=False)
    loop.loaders_seen.evaluated(loader, stage)
    loader.trained = False
    hooks = loop.dispatch.hooks
    start, end = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
    try:
        for batch in loader.batches():
            index = loader.batch_index
            for hook in hooks[start]:
                hook(loop.run, loop.model, batch, index, *extra)
            yield batch
            for hook in hooks[end]:
                hook(loop.run, loop.model, None, batch, index, *extra)
    finally:
        loop.leave(loader, token)
        if alone and loop.stages:
            loop.stages.pop()
            loop.left_open.append(partial(_fire_end, loop, stage))
    loop.settle()


def counted_epochs(loop: Loop, total: int) -> Iterator[int]:
    """The epochs of ``run.epochs``, with their hooks."""
    run = loop.run
    loop.settle()
    run.max_epochs = total
    run.epochs_done = run.first_epoch  # passes before this, to warm up say, do not count
    vote(loop)
    if run.epochs_done >= total:
        run.accelerator._notice(f"nothing left to do: {run.epochs_done} epochs are done")
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
            loop.settle()
            loop.end_epoch(epoch, counted=True)
            poll(loop)
            vote(loop)
            if run.should_stop:
                return
    except GeneratorExit:
        if run.epoch_open:
            loop.left_open.append(lambda: loop.end_epoch(run.current_epoch, counted=True))
        raise
    finally:
        loop.epochs_counted = False


def training_pass(loop: Loop, loader: DataLoaderShard) -> Iterator[Any]:
    """One pass over training data, with the hooks of batches (and of epochs in a plain loop)."""
    run = loop.run
    if run.should_stop:
        if not loop.stop_is_old:
            return
        run.should_stop = False
    loop.begin_training()
    token = loop.enter(loader, outer=True)
    done, loader.done = loader.done, False
    loader.trained = True
    run.num_training_batches = length_of(loader)
    dispatch, saves = loop.dispatch, loop.saves
    hooks = dispatch.hooks  # whose entries change when callbacks come and go
    index, batch, seen, looked = -1, None, 0, False
    asked = perf_counter()
    try:
        for batch in loader.batches():
            run.data_wait_s += perf_counter() - asked
            if not run.epoch_open:
                loop.open_plain_epoch(loader.epoch)
            run.batch_idx = index = loader.batch_index
            seen += 1
            loop.begin_batch(loader)
            for hook in hooks["on_train_batch_start"]:
                hook(run, loop.model, batch, index)
            yield batch
            # Each call less in the loop is felt: this code is cold after the work of a step.
            if (
                hooks["on_train_batch_end"]
                or dispatch.can_vote
                or run.votes.asked
                or loop.left_open
                or saves.pending
            ):
                _end_batch(loop, batch, index)
            else:
                loop.worked = True
            if run.should_stop and not loop.window.is_open:
                loop.stop_pass(loader)
                break
            asked = perf_counter()
    except GeneratorExit:
        if loader.passes != token:  # an iterator that was kept; a newer pass goes on
            raise
        # `next(iter(loader))` before the loop is no epoch: the first batch comes again.
        looked = seen == 1 and not loop.worked and len(loop.optimizers) > 0
        if looked:
            loader.undo_pass()
            loader.done = done
        else:
            loader.end_pass()
            if loop.worked:
                loop.left_open.append(lambda: _end_batch(loop, batch, index))
        raise
    finally:
        if loop.leave(loader, token) and not looked:
            loader.done = loader.finished
            loop.close_plain_epoch(loader.epoch)
    loop.settle()


def _end_batch(loop: Loop, batch: Any, index: int) -> None:
    """The loop's body is over: ``on_train_batch_end``, and the vote."""
    if loop.left_open:
        loop.settle()
    loop.worked = True  # whatever the body did with it, this batch is done
    poll(loop)
    hooks = loop.dispatch.hooks["on_train_batch_end"]
    if hooks:
        outputs = None if loop.last_loss is None else {"loss": loop.last_loss.detach()}
        for hook in hooks:
            hook(loop.run, loop.model, outputs, batch, index)
    if loop.dispatch.can_vote or loop.run.votes.asked:
        vote_within(loop)


def feeding_pass(loop: Loop, loader: DataLoaderShard) -> Iterator[Any]:
    """A pass over a second loader inside of a training loop: data without hooks."""
    token = loop.enter(loader, outer=False)
    loader.trained = True
    try:
        for batch in loader.batches():
            loop.deliveries.note(loader)
            yield batch
    except GeneratorExit:
        if loader.passes == token:
            loader.end_pass()
        raise
    finally:
        loop.leave(loader, token)
