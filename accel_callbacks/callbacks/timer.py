"""Timer: measure the time of a run, and stop it after a maximum duration."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.base import ResumableState
from accel_callbacks.callbacks.interval import Interval
from accel_callbacks.errors import nearest

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Timer"]

_STAGES = ("train", "validation", "test")


class Timer(ResumableState):
    """Stop the run after a duration; the time before a resume counts too.

    With several processes the ranks vote on the stop: all stop at the same step, the one after that
    in which the time is up on one of them. The training time includes that of the evaluations.

    Args:
        duration: how long to train: ``"8 h"``, ``"01:30:00"``, ``"1:00:00:00"`` (days first), a
            ``timedelta`` or seconds. ``None`` (the default) only measures.
        interval: ``"step"`` (the default) stops at the end of a step, ``"epoch"`` at the end of an
            epoch of ``run.epochs`` (in a plain loop with several processes, use ``"step"``).

    Attributes:
        duration: in seconds, or ``None``.

    Raises:
        ValueError: the duration is not a time, or the interval is unknown.

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
        (1, 'the time is up: trained for 0.001 s')
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
        self._elapsed = dict.fromkeys(_STAGES, 0.0)  # seconds up to the last stop of each clock
        self._since: dict[str, float] = {}  # of running clocks, by time.monotonic()
        self._started: dict[str, float] = {}

    @property
    def state_key(self) -> str:
        """``Timer:<interval>``, so that one of each can be used."""
        return f"Timer:{self.interval}"

    # --- results ------------------------------------------------------------------------------

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in a stage so far, including those before a resume.

        Args:
            stage: ``"train"``, ``"validation"`` or ``"test"``.

        Raises:
            ValueError: the stage is unknown.
        """
        since = self._since.get(_stage_name(stage))
        return self._elapsed[_stage_name(stage)] + (
            0.0 if since is None else time.monotonic() - since
        )

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds left of ``duration``, at least 0; ``None`` without one."""
        if self.duration is None:
            return None
        return max(0.0, self.duration - self.time_elapsed(stage))

    def start_time(self, stage: str = "train") -> float | None:
        """Return when a stage started in this process, by ``time.time()``, or ``None``."""
        return self._started.get(_stage_name(stage))

    # --- measuring ----------------------------------------------------------------------------

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Stop a resumed run that has no time left."""
        self._stop_if_time_is_up(run)

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Start the clock of training."""
        self._start("train")

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Stop the clock of training."""
        self._stop("train")

    def on_validation_start(self, run: TrainingRun, model: Any) -> None:
        """Start the clock of evaluations."""
        self._start("validation")

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """Stop the clock of evaluations."""
        self._stop("validation")

    def on_test_start(self, run: TrainingRun, model: Any) -> None:
        """Start the clock of tests."""
        self._start("test")

    def on_test_end(self, run: TrainingRun, model: Any) -> None:
        """Stop the clock of tests."""
        self._stop("test")

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop at this step, if the time is up."""
        if self.can_vote:
            self._stop_if_time_is_up(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Stop after this epoch, if the time is up."""
        self._stop_if_time_is_up(run)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Stop all clocks, after an error too."""
        for name in list(self._since):
            self._stop(name)

    def _start(self, stage: str) -> None:
        self._started[stage] = time.time()
        self._since[stage] = time.monotonic()

    def _stop(self, stage: str) -> None:
        self._elapsed[stage] = self.time_elapsed(stage)
        self._since.pop(stage, None)

    def _stop_if_time_is_up(self, run: TrainingRun) -> None:
        if self.duration is not None and self.time_elapsed() >= self.duration:
            spent = Interval(self.duration, "seconds")
            run.stop(f"the time is up: trained for {spent}")

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds by stage."""
        return {"elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the seconds, but not ``duration``: a longer one continues the run."""
        self._elapsed.update(state_dict["elapsed"])
        for stage in self._since:
            self._since[stage] = time.monotonic()


def _stage_name(stage: str) -> str:
    stage = "validation" if stage == "validate" else stage  # as Lightning calls it
    if stage not in _STAGES:
        raise ValueError(
            f"stage={stage!r} is unknown; use 'train', 'validation' or 'test'."
            f"{nearest(stage, _STAGES)}"
        )
    return stage
