"""Where the run stands, as a callback of Lightning asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.adapters.trainer_constants import TrainerConstants
from accel_callbacks.integrations.lightning.packages import LightningPackage
from accel_callbacks.trainer_attributes import length_of

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["TrainerPosition"]


class TrainerPosition(TrainerConstants):
    """The part of the trainer that tells epoch, stage and stop.

    Example:
        >>> from accel_callbacks.callbacks.adapters.trainer_position import TrainerPosition
        >>> TrainerPosition.sanity_checking
        False
    """

    accel_run: TrainingRun
    hook: str
    epoch: int | None
    asked_to_stop: bool
    _package: LightningPackage

    @property
    def current_epoch(self) -> int:
        """Index of the epoch."""
        return self.accel_run.current_epoch if self.epoch is None else self.epoch

    @property
    def should_stop(self) -> bool:
        """The run stops, or this callback has asked for it; set it to True to ask."""
        return self.asked_to_stop or self.accel_run.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.asked_to_stop = bool(value) and not self.accel_run.should_stop

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of a step; settable."""
        return self.accel_run.accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self.accel_run.accumulate_grad_batches = value

    @property
    def state(self) -> Any:
        """Lightning's own record of function and stage."""
        stage = "train" if self.training else "validate" if self.validating else "test"
        return self._package.get("trainer.states", "TrainerState")(
            status=self._package.get("trainer.states", "TrainerStatus").RUNNING,
            fn=self._package.get("trainer.states", "TrainerFn")("test" if self.testing else "fit"),
            stage=self._package.get("trainer.states", "RunningStage")(stage),
        )

    @property
    def training(self) -> bool:
        """In no evaluation."""
        return not self.evaluating

    @property
    def validating(self) -> bool:
        """In a hook of a validation."""
        return "validation" in self.hook

    @property
    def testing(self) -> bool:
        """In a hook of a test."""
        return "on_test" in self.hook

    @property
    def evaluating(self) -> bool:
        """In a hook of either."""
        return self.validating or self.testing

    @property
    def num_training_batches(self) -> int | float:
        """Batches of a training epoch; before the first, those of the first prepared loader."""
        run = self.accel_run
        loaders = run.accelerator.loaders
        if run.train_dataloader is None and loaders:
            return length_of(loaders[0])
        return run.num_training_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader, as far as they are known."""
        return self._lengths(self.accel_run.num_val_batches, self.validating)

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader, as far as they are known."""
        return self._lengths(self.accel_run.num_test_batches, self.testing)

    def _lengths(self, known: list[int | float], now: bool) -> list[int | float]:
        """With that of the loader which is being iterated in its place."""
        loop = self.accel_run.accelerator.loop
        place = loop.eval_loaders - 1
        if not now or not loop.active or place < 0:
            return known
        here = length_of(loop.active[-1])
        known = known + [float("inf")] * (place + 1 - len(known))
        return [*known[:place], here, *known[place + 1 :]]
