"""Measure how long a run trains, and stop it when its time is over."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.interval import Interval
from accel_callbacks.callbacks.resumable_state import ResumableState
from accel_callbacks.errors import nearest

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Timer"]

_STAGES = ("train", "validation", "test")


class Timer(ResumableState):
    """Stops the run after so much time; what a run has used before a resume counts too.

    With several processes the stop is put to the vote: all stop at the same step, where the first
    of their clocks is over. The time of training has that of the evaluations in it.

    Args:
        duration: how long to train: ``"8 h"``, ``"01:30:00"``, ``"1:00:00:00"`` (days first), a
            ``timedelta`` or seconds. ``None`` (the default) only measures.
        interval: ``"step"`` (the default) stops at the end of a step, ``"epoch"`` of an epoch that
            ``run.epochs`` counts (in a plain loop of several processes, use ``"step"``).

    Attributes:
        duration: in seconds, or ``None``.

    Raises:
        ValueError: the duration is no time, or an unknown interval.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Timer
        >>> timer = Timer("1 ms", interval="epoch")
        >>> accel = Accelerator(cpu=True, callbacks=[timer])
        >>> data = accel.prepare(torch.utils.data.DataLoader(range(2000)))
        >>> with accel.run("demo") as run:
        ...     for epoch in run.epochs(100):
        ...         for batch in data:
        ...             pass
        >>> run.epochs_done, run.stop_reason
        (1, 'the time is over: trained for 0.001 s')
        >>> timer.time_remaining()
        0.0
    """

    def __init__(
        self, duration: str | float | timedelta | None = None, interval: str = "step"
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ValueError(f"interval={interval!r} is unknown; use 'step' or 'epoch'.")
        self.duration = None if duration is None else Interval.seconds(duration, "duration")
        self.interval = interval
        self.can_vote = duration is not None and interval == "step"
        self.reset_state()

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        self._before = dict.fromkeys(_STAGES, 0.0)  # seconds that are over
        self._since: dict[str, float] = {}  # stages that run now
        self._started: dict[str, float] = {}

    @property
    def state_key(self) -> str:
        """``Timer:<interval>``, so that one of each can be there."""
        return f"Timer:{self.interval}"

    # --- reading it ---------------------------------------------------------------------------

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds spent in a stage so far, those before a resume included.

        Args:
            stage: ``"train"``, ``"validation"`` or ``"test"``.

        Raises:
            ValueError: another stage.
        """
        since = self._since.get(_known(stage))
        return self._before[_known(stage)] + (0.0 if since is None else time.monotonic() - since)

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds left of ``duration``, at least 0; ``None`` without one."""
        if self.duration is None:
            return None
        return max(0.0, self.duration - self.time_elapsed(stage))

    def start_time(self, stage: str = "train") -> float | None:
        """When a stage began in this process, in seconds since the epoch; ``None`` before."""
        return self._started.get(_known(stage))

    # --- measuring ----------------------------------------------------------------------------

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """A resumed run may have no time left."""
        self._stop_if_over(run)

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """The clock of training goes."""
        self._begin("train")

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """It stands."""
        self._end("train")

    def on_validation_start(self, run: TrainingRun, model: Any) -> None:
        """The clock of evaluations goes."""
        self._begin("validation")

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """It stands."""
        self._end("validation")

    def on_test_start(self, run: TrainingRun, model: Any) -> None:
        """The clock of tests goes."""
        self._begin("test")

    def on_test_end(self, run: TrainingRun, model: Any) -> None:
        """It stands."""
        self._end("test")

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop at this step, if the time is over."""
        if self.can_vote:
            self._stop_if_over(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Stop after this epoch, if the time is over."""
        self._stop_if_over(run)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """All clocks stand, after an error too."""
        for name in list(self._since):
            self._end(name)

    def _begin(self, stage: str) -> None:
        self._started[stage] = time.time()
        self._since[stage] = time.monotonic()

    def _end(self, stage: str) -> None:
        self._before[stage] = self.time_elapsed(stage)
        self._since.pop(stage, None)

    def _stop_if_over(self, run: TrainingRun) -> None:
        if self.duration is not None and self.time_elapsed() >= self.duration:
            spent = Interval(self.duration, "seconds")
            run.stop(f"the time is over: trained for {spent}")

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Seconds by stage."""
        return {"elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore; ``duration`` stays what the constructor was given, so more of it goes on."""
        self._before.update(state_dict["elapsed"])
        for stage in self._since:
            self._since[stage] = time.monotonic()


def _known(stage: str) -> str:
    stage = "validation" if stage == "validate" else stage  # as Lightning calls it
    if stage not in _STAGES:
        raise ValueError(
            f"stage={stage!r} is unknown; use 'train', 'validation' or 'test'."
            f"{nearest(stage, _STAGES)}"
        )
    return stage
