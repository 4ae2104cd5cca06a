"""What surrounds epochs, and the batches of a loader as training, as mere data, as validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accel_callbacks.data.loader import DataLoaderShard

if TYPE_CHECKING:
    from accel_callbacks.loop import Loop

__all__ = ["counted_epochs", "evaluation_pass", "feeding_pass", "poll_outside", "training_pass"]


def counted_epochs(loop: Loop, total: int) -> Iterator[int]:
    """The epochs of ``run.epochs``, with their hooks."""
    run = loop.run
    loop.settle()
    run.max_epochs = total
    run.epochs_done = run.first_epoch  # passes before this, to warm up say, do not count
    run.agree()
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
            _poll(loop)
            run.agree()
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
        return
    loop.begin_training()
    token = loop.enter(loader, outer=True)
    done, loader.done = loader.done, False
    loader.trained = True
    run.num_training_batches = _length(loader)
    start_hooks = loop.dispatch.hooks["on_train_batch_start"]
    # Each call less in the loop is felt: this code is cold after the work of a step.
    quiet = not loop.dispatch.hooks["on_train_batch_end"] and not loop.dispatch.can_vote
    saves = loop.saves
    index, batch, seen, looked = -1, None, 0, False
    try:
        for batch in loader.batches():
            if not run.epoch_open:
                loop.open_plain_epoch(loader.epoch)
            run.batch_idx = index = loader.batch_index
            seen += 1
            loop.begin_batch(loader)
            for hook in start_hooks:
                hook(run, loop.model, batch, index)
            yield batch
            if quiet and not loop.left_open and not saves.pending:
                loop.worked = True
            else:
                _end_batch(loop, batch, index)
            if run.should_stop and not loop.window.is_open:
                loop.stop_pass(loader)
                break
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
    """The loop's body is over: ``on_train_batch_end``, and the vote on stopping."""
    if loop.left_open:
        loop.settle()
    loop.worked = True  # whatever the body did with it, this batch is done
    _poll(loop)
    hooks = loop.dispatch.hooks["on_train_batch_end"]
    if hooks:
        outputs = None if loop.last_loss is None else {"loss": loop.last_loss.detach()}
        for hook in hooks:
            hook(loop.run, loop.model, outputs, batch, index)
    if loop.dispatch.can_vote and not loop.window.is_open:
        loop.run.agree()


def _poll(loop: Loop) -> None:
    """At a step boundary: learn whether the save that is under way has ended."""
    window = loop.window
    # In a block of join_uneven_inputs the processes do not come here equally often.
    if loop.saves.pending and not window.is_open and not window.normalizer.closed:
        loop.saves.poll()


def poll_outside(loop: Loop) -> None:
    """The same where no prepared loader tells where a step ends: before the next one's backward."""
    window = loop.window
    if not loop.active and window.position <= 1 and not window.normalizer.closed:
        loop.saves.poll()


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


def evaluation_pass(loop: Loop, loader: DataLoaderShard) -> Iterator[Any]:
    """One pass over validation data; in a plain loop it is an evaluation of its own."""
    alone = not loop.evaluating
    if alone:
        loop.begin_evaluation()
    # Lightning passes the loader's index only where there are several loaders.
    extra = (loop.eval_loaders,) if loop.eval_loaders else ()
    loop.eval_loaders += 1
    token = loop.enter(loader, outer=False)
    loader.trained = False
    start_hooks = loop.dispatch.hooks["on_validation_batch_start"]
    end_hooks = loop.dispatch.hooks["on_validation_batch_end"]
    try:
        for batch in loader.batches():
            index = loader.batch_index
            for hook in start_hooks:
                hook(loop.run, loop.model, batch, index, *extra)
            yield batch
            for hook in end_hooks:
                hook(loop.run, loop.model, None, batch, index, *extra)
    finally:
        loop.leave(loader, token)
        if alone and loop.evaluating:
            loop.evaluating -= 1
            loop.left_open.append(loop.fire_evaluation_end)
    loop.settle()


def _length(loader: DataLoaderShard) -> int | float:
    try:
        return len(loader)
    except TypeError:
        return float("inf")
