"""RunFlags: what has begun and what is over in the life of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["RunFlags"]


@dataclass(slots=True)
class RunFlags:
    """The decisions about a run that each hook is fired by once.

    Attributes:
        fit_started: ``setup`` has fired, and ``teardown`` has not.
        train_started: ``on_train_start`` has fired.
        warming_up: training began without a prepared loader or epochs, so that it may be no more
            than some steps before a run.
        stop_consumed: the run's stop ended a training that is over, so that another one may start.
        ended: the run that has ended last.
        settling: deferred hooks are being fired.
        pending_teardowns: of a run that ends, those that were not called yet; None before.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> with accel.run("demo") as run:
        ...     print(accel.loop.flags.fit_started)
        True
        >>> accel.loop.flags.fit_started, accel.loop.flags.ended is run
        (False, True)
    """

    fit_started: bool = False
    train_started: bool = False
    warming_up: bool = False
    stop_consumed: bool = False
    settling: bool = False
    ended: TrainingRun | None = None
    pending_teardowns: list[Callable[..., None]] | None = None

    def withdraw_consumed_stop(self, run: TrainingRun) -> None:
        """Withdraw a stop that ended an earlier training."""
        if self.stop_consumed and run.should_stop:
            run.should_stop = False

    def end(self, run: TrainingRun) -> None:
        """Note that a run is over, so that another one can start."""
        self.fit_started = self.train_started = False
        self.ended, self.pending_teardowns = run, None
        # The stop of a run that is over must not end a plain loop that follows in the script.
        self.stop_consumed = run.should_stop
