"""A last checkpoint where an error ends the run, as far as this process can do it alone."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from accel_callbacks import collectives

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import CheckpointFolder, SaveJob

__all__ = ["is_after_error", "save_after_error"]

_PREFIX = "exception-step-"


def is_after_error(name: str) -> bool:
    """Whether a checkpoint's name says that an error ended the run there.

    Example:
        >>> from accel_callbacks.callbacks.on_exception_checkpoint import is_after_error
        >>> is_after_error("exception-step-00000012"), is_after_error("step-00000012")
        (True, False)
    """
    return name.startswith(_PREFIX)


def save_after_error(
    run: TrainingRun,
    folder: CheckpointFolder,
    error: BaseException,
    max_shard_size: int | str,
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Save into ``exception-step-<step>`` and say where; no error of its own hides the first.

    Args:
        run: that ends.
        folder: of the run's checkpoints.
        error: what ends it.
        max_shard_size: largest tensor file.
        storage_options: for the filesystem behind the folder.
    """
    if collectives.world_size() > 1:
        if run.is_global_zero:
            _say("no checkpoint of the error: that takes all processes, and some may be gone")
        return
    if _broke_a_step(error):
        _say("no checkpoint of the error: it came in the middle of an optimizer step")
        return
    target = _Beside(folder, storage_options)
    try:
        _await_the_save_before(run)
        with _within_the_epoch(run):
            path = run.accelerator.checkpointer.write(
                cast("CheckpointFolder", target),
                metadata={"exception": f"{type(error).__name__}: {error}"[:1000]},
                max_shard_size=max_shard_size,
            )
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"
        warnings.warn(f"the state at the error could not be saved: {text}", stacklevel=3)
    else:
        _say(f"saved the state at the error; resume={path!r} goes on from there")


class _Beside:
    """A folder whose next checkpoint is older than all others: only if asked for is it resumed."""

    def __init__(self, folder: CheckpointFolder, storage_options: Mapping[str, Any] | None) -> None:
        self._folder = folder
        self._options = storage_options

    def path(self, step: int) -> str:
        """The URL of the checkpoint."""
        head, name = self._folder.path(step).rsplit("step-", 1)
        return f"{head}{_PREFIX}{name}"

    def prepare_save(self, step: int, state: Mapping[str, Any], **options: Any) -> SaveJob:
        """``CheckpointFolder.prepare_save``, with the lowest generation."""
        from checkpoint_io import prepare_save

        return prepare_save(
            self.path(step),
            state,
            next_generation=lambda previous: 0,
            storage_options=self._options,
            **options,
        )


def _await_the_save_before(run: TrainingRun) -> None:
    """One that was under way; if it fails, there is all the more reason to save now."""
    import checkpoint_io

    try:
        run.accelerator.loop.saves.wait()
    except checkpoint_io.CheckpointError as problem:
        warnings.warn(f"the save before has failed: {problem}", stacklevel=4)


@contextmanager
def _within_the_epoch(run: TrainingRun) -> Iterator[None]:
    """What unwinds has ended the pass over the data as ``break`` does; what is saved is inside."""
    loop = run.accelerator.loop
    loader = loop.train_loader
    trained = loop.worked and run.batch_idx + 1 >= run.num_training_batches
    if loader is None or loader in loop.active or trained or not run.epoch_open:
        yield
        return
    before = loader.finished, loader.done
    loader.finished = loader.done = False
    loop.active.append(loader)
    try:
        yield
    finally:
        loop.active.remove(loader)
        loader.finished, loader.done = before


def _broke_a_step(error: BaseException) -> bool:
    """Whether it left an optimizer in the middle of a step: some weights are new, some old."""
    from accel_callbacks.optimizer import AcceleratedOptimizer

    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(owner, torch.optim.Optimizer) and not isinstance(owner, AcceleratedOptimizer):
            return True
        trace = trace.tb_next
    return False


def _say(text: str) -> None:
    print(f"[accel] {text}", file=sys.stderr, flush=True)
