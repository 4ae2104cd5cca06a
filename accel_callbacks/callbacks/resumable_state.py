"""ResumableState: reset a callback's state when a run starts, unless the run was resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.base import Callback

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["ResumableState"]


class ResumableState(Callback):
    """Base class of callbacks whose state belongs to one run and survives a resume of it.

    ``setup`` resets the state where nothing was loaded and nothing trained. An evaluation after the
    end of a run fires ``setup`` too; the state of that run is kept then.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks.resumable_state import ResumableState
        >>> class CountEpochs(ResumableState):
        ...     def reset_state(self):
        ...         self.epochs = 0
        ...
        ...     def on_train_epoch_end(self, run, model):
        ...         self.epochs += 1
        >>> counter = CountEpochs()
        >>> accel = Accelerator(cpu=True, callbacks=[counter])
        >>> for _ in range(2):
        ...     with accel.run("demo") as run:
        ...         for epoch in run.epochs(3):
        ...             pass
        >>> counter.epochs
        3
    """

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        raise NotImplementedError

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the state, unless ``load_state`` restored it."""
        if run.starts_fresh:
            self.reset_state()
