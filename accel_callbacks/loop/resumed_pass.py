"""The first training pass after a load: where it begins, and whether the script skips by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.errors import ResumeError
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.run import length_of
from accel_callbacks.models.compile import hook_calls
from checkpoint_io.warning import warn

__all__ = ["read_on"]

_MOST = 0.75  # of the batches
_SKIPPED = (
    "{} after load_state {} not trained on, and {} lost: the prepared loader "
    "had gone on after the {} that were done before. Leave out the script's own skip (`if step < "
    "...: continue`) and count with enumerate(loader, start=...), or iterate "
    "accel.skip_first_batches(loader, step), which counts from the start of the epoch."
)


def read_on(loader: DataLoaderShard, loop: Loop, end_epoch: Callable[[int], None]) -> Iterator[Any]:
    """Return the batches of a pass that goes on within an epoch.

    If nothing is left of that epoch, and the script has not asked the run for its number, the
    script counts it as done, and the pass is the next epoch.

    Args:
        loader: begins the pass.
        loop: has the run, and the prepared models and optimizers.
        end_epoch: ends an epoch of this number that the script has counted as done.
    """
    run = loop.run
    loader.counted_done = run.epoch_unknown and not loop.epochs_counted
    if loader.moves_on:
        end_epoch(run.current_epoch)
        return loader.batches()
    trains = loader.resumes and len(loop.optimizers) > 0 and not _leaves_batches_out(loader, loop)
    return _SkipWatch(loader, loop).batches() if trains else loader.batches()


def _leaves_batches_out(loader: DataLoaderShard, loop: Loop) -> bool:
    """Return whether the script took fewer steps than it read batches, as of those without labels.

    It leaves them out after a load too, and some may be the first ones. A few steps that fp16 has
    skipped are no sign.
    """
    length = length_of(loader)
    before = loader.epoch * length if length != float("inf") else 0
    steps = (loop.run.global_step + 1) * loop.window.num_steps  # one may be under way
    return steps < _MOST * (before + loader.batches_done)


class _SkipWatch:
    """Counts the batches that are not trained on, up to the first backward or step after a load.

    A script that skips what its loader has skipped leaves out as many as were done before, or all
    that are left: an error, as nothing is trained yet. A single batch may be a bad one, and a model
    that was called may have been evaluated.

    Args:
        loader: begins a pass in the middle of an epoch.
        loop: has the prepared models.
    """

    def __init__(self, loader: DataLoaderShard, loop: Loop) -> None:
        self._loader, self._loop = loader, loop
        self._done = self._idle = 0
        self._called = self._ended = False
        self._check = self._refuse_skip  # one object, by which the loop's is known

    def batches(self) -> Iterator[Any]:
        """Yield the rest of the epoch."""
        loader, loop, step = self._loader, self._loop, self._loop.step
        batches = loader.batches()
        handles = hook_calls(loop.models, self._note_call)
        if step.before_work is None:
            step.before_work = self._check
        try:
            for batch in batches:
                self._done = self._done or loader.batch_index
                yield batch
                if self._called or step.before_work is not self._check:
                    break
                self._idle += 1
            else:
                # An error at the first step of a later epoch, as one that only reads the rest loses
                # nothing; and told now, as no step may follow.
                self._ended = self._idle > 0
                if 1 < self._idle <= self._done:
                    warn(self._describe_loss())
        finally:
            for handle in handles:
                handle.remove()
            if not self._ended:
                self._stop()
        yield from batches

    def _refuse_skip(self, action: str) -> None:
        """Raise if the script has skipped, before this backward or step is its first."""
        self._stop()
        if self._ended or self._idle == self._done:
            self._tell(f"{action}: ")

    def _tell(self, action: str = "") -> None:
        """Raise for batches that were not trained on; warn of a single one."""
        if self._idle > 1:
            raise ResumeError(f"{action}{self._describe_loss()}")
        if self._idle == 1:
            warn(self._describe_loss())

    def _describe_loss(self) -> str:
        if self._idle == 1:
            return _SKIPPED.format("1 batch", "was", "is", self._done)
        return _SKIPPED.format(f"the first {self._idle} batches", "were", "are", self._done)

    def _note_call(self, *_: Any) -> None:
        self._called = True

    def _stop(self) -> None:
        if self._loop.step.before_work is self._check:
            self._loop.step.before_work = None
