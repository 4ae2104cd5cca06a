"""Save a checkpoint when an error ends a run of one process."""

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

__all__ = ["is_exception_checkpoint", "save_on_exception"]

_PREFIX = "exception-step-"


def is_exception_checkpoint(name: str) -> bool:
    """Return whether a checkpoint's name is that of one saved on an exception.

    Example:
        >>> from accel_callbacks.callbacks.on_exception_checkpoint import is_exception_checkpoint
        >>> is_exception_checkpoint("exception-step-00000012")
        True
        >>> is_exception_checkpoint("step-00000012")
        False
    """
    return name.startswith(_PREFIX)


def save_on_exception(
    run: TrainingRun,
    folder: CheckpointFolder,
    error: BaseException,
    max_shard_size: int | str,
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Save into ``exception-step-<step>`` and print its path; a failure to save is a warning.

    Args:
        run: the run that ends.
        folder: of the run's checkpoints.
        error: what ends the run.
        max_shard_size: largest tensor file.
        storage_options: for the filesystem behind the folder.
    """
    if collectives.world_size() > 1:
        if run.is_global_zero:
            _notify("no checkpoint of the error: saving takes all ranks, and some may be gone")
        return
    if _interrupted_a_step(error):
        _notify("no checkpoint of the error: it was raised in the middle of an optimizer step")
        return
    target = _ExceptionFolder(folder, storage_options)
    try:
        _wait_for_pending_save(run)
        with _inside_epoch(run):
            path = run.accelerator.checkpointer.write(
                cast("CheckpointFolder", target),
                metadata={"exception": f"{type(error).__name__}: {error}"[:1000]},
                max_shard_size=max_shard_size,
            )
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"
        warnings.warn(f"the state at the error could not be saved: {text}", stacklevel=3)
    else:
        _notify(f"saved the state at the error; resume={path!r} continues from there")


class _ExceptionFolder:
    """Save with the lowest generation, so that the checkpoint is not the newest of the folder.

    ``resume=True`` then prefers any other checkpoint.
    """

    def __init__(self, folder: CheckpointFolder, storage_options: Mapping[str, Any] | None) -> None:
        self._folder = folder
        self._options = storage_options

    def path(self, step: int) -> str:
        """Return the URL of the checkpoint."""
        head, name = self._folder.path(step).rsplit("step-", 1)
        return f"{head}{_PREFIX}{name}"

    def prepare_save(self, step: int, state: Mapping[str, Any], **options: Any) -> SaveJob:
        """Call ``checkpoint_io.prepare_save`` with the lowest generation."""
        from checkpoint_io import prepare_save

        return prepare_save(
            self.path(step),
            state,
            next_generation=lambda previous: 0,
            storage_options=self._options,
            **options,
        )


def _wait_for_pending_save(run: TrainingRun) -> None:
    """Wait for a save in progress; if it fails, warn, because this save is needed even more."""
    import checkpoint_io

    try:
        run.accelerator.loop.saves.wait()
    except checkpoint_io.CheckpointError as problem:
        warnings.warn(f"the previous save failed: {problem}", stacklevel=4)


@contextmanager
def _inside_epoch(run: TrainingRun) -> Iterator[None]:
    """Reopen the pass over the data, so that a resume continues inside the epoch."""
    # The exception has closed the loader's generator, which ended the pass as `break` does.
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


def _interrupted_a_step(error: BaseException) -> bool:
    """Return whether it was raised inside ``optimizer.step``, with only some weights updated."""
    from accel_callbacks.optimizer import AcceleratedOptimizer

    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(owner, torch.optim.Optimizer) and not isinstance(owner, AcceleratedOptimizer):
            return True
        trace = trace.tb_next
    return False


def _notify(text: str) -> None:
    print(f"[accel] {text}", file=sys.stderr, flush=True)
