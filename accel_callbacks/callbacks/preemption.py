"""Give way when the cluster asks: save, stop, and say by the exit code that there is more to do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.checkpoint import Checkpoint
from accel_callbacks.callbacks.interval import Interval
from accel_callbacks.callbacks.requeue import requeue_slurm
from accel_callbacks.callbacks.signals import SignalCatcher, read_signals

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["Preemption"]


class Preemption(Callback):
    """Turns a signal into a checkpoint and a tidy end, on all processes at the same step.

    The first SIGTERM or SIGUSR1 that any process of the run gets is put to the vote at the end of
    the step. Then ``on_preempt`` fires on all of them, in which :class:`Checkpoint` saves and waits
    until it is durable; the run stops, its end hooks and trackers finish, and leaving ``accel.run``
    (or ``end_training``) raises ``SystemExit(exit_code)``. Started again, the script resumes.

    Signals are caught from the beginning to the end of a run, in the main thread, and mean
    afterwards what they meant before. So does a second one of the same kind that comes five seconds
    later or more; sooner, it is the same one, passed on by a launcher. A signal that comes after
    the last step of a run holds for the next run.

    Args:
        signals: by name or number; ``("SIGTERM", "SIGUSR1")`` by default.
        exit_code: of the process; 75 by default, which means "try again later". ``None``: the
            script goes on after the run.
        requeue: ``"slurm"`` to have the main process call ``scontrol requeue`` once all is saved
            (nothing outside of a SLURM job), a function of the run, or ``None`` (the default).
        grace_period: how long after the signal the run may take to its end, as an interval such as
            ``"90 s"``; then the signal ends the process as if it were not caught. ``None`` (the
            default) waits for the step, however long it takes.

    Attributes:
        received: name of the signal that this process got, or ``None``.

    Raises:
        ValueError: an unknown signal, exit code or ``requeue``, or a period that is no time.

    Example:
        >>> import signal, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Preemption
        >>> accel = Accelerator(cpu=True, callbacks=[Preemption(exit_code=None)])
        >>> data = accel.prepare(torch.utils.data.DataLoader(range(4)))
        >>> with accel.run("demo") as run:
        ...     for batch in data:
        ...         signal.raise_signal(signal.SIGTERM)
        >>> run.preempted, run.batch_idx, run.stop_reason
        (True, 0, 'SIGTERM')
    """

    can_vote = True
    runs_last = True  # so that what is requeued is saved already
    after = (Checkpoint,)

    def __init__(
        self,
        signals: Sequence[str | int] = ("SIGTERM", "SIGUSR1"),
        exit_code: int | None = 75,
        requeue: str | Callable[[TrainingRun], Any] | None = None,
        grace_period: str | float | timedelta | None = None,
    ) -> None:
        if isinstance(requeue, str) and requeue != "slurm":
            raise ValueError(f"requeue={requeue!r} is unknown; use 'slurm' or a function.")
        if exit_code is not None and not 0 <= exit_code <= 255:
            raise ValueError(f"exit_code={exit_code} must be from 0 to 255, or None.")
        listed = (signals,) if isinstance(signals, (str, int)) else signals
        patience = None if grace_period is None else Interval.seconds(grace_period, "grace_period")
        self.exit_code = exit_code
        self.requeue = requeue
        self._catcher = SignalCatcher(read_signals(listed), patience)

    @property
    def received(self) -> str | None:
        """The name of the signal that this process got."""
        return None if self._catcher.caught is None else self._catcher.caught.name

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Catch the signals."""
        self._catcher.install()

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """A signal may have come while a checkpoint was restored, or after the run before."""
        if self._catcher.caught is not None:
            run.preempt(self._catcher.caught.name)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask all processes to give way at this step, if a signal came."""
        if self._catcher.caught is not None:
            run.preempt(self._catcher.caught.name)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """The same for a signal that came in the validation."""
        if self._catcher.caught is not None and not run.preempted:
            run.preempt(self._catcher.caught.name)

    def on_preempt(self, run: TrainingRun, model: Any, reason: str) -> None:
        """All is saved: settle the exit code, and requeue the job on the main process."""
        self._catcher.caught = None
        run.exit_code = self.exit_code
        if self.requeue is not None and run.is_global_zero:
            self._requeue(run)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """The signals mean again what they meant before."""
        self._catcher.restore()
        if self._catcher.caught is not None:
            _say(f"{self.received} came too late to stop this run; the next one gives way")

    def _requeue(self, run: TrainingRun) -> None:
        try:
            if callable(self.requeue):
                self.requeue(run)
            elif job := requeue_slurm():
                _say(f"job {job} is in the queue again")
        except Exception as error:  # all is saved, and the exit code still says so
            problem = f"{type(error).__name__}: {error}"
            warnings.warn(f"the job could not be put into the queue again: {problem}", stacklevel=2)


def _say(text: str) -> None:
    print(f"[accel] {text}", file=sys.stderr, flush=True)
