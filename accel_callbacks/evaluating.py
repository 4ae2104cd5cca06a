"""Evaluations: their hooks, and a pass over a loader as validation or as a test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_callbacks.data.loader import DataLoaderShard

if TYPE_CHECKING:
    from accel_callbacks.loop.loop import Loop

__all__ = ["begin_evaluation", "end_evaluation", "evaluation_pass"]


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
