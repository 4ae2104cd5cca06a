"""Preemption: signals, SLURM requeue."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.checkpoint import Checkpoint
from accel_callbacks.callbacks.interval import Interval
from accel_callbacks.errors import nearest

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Preemption", "SignalCatcher", "read_signals", "requeue_slurm"]

_LONGEST = 60.0  # seconds that scontrol may take; the job may be killed any moment
_STUCK = 2.0  # seconds that a main thread may need to get to its signal
_DEADLY = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP")  # that parents send to end their children


def requeue_slurm() -> str:
    """``scontrol requeue`` this job; returns its number, or an empty string outside of SLURM.

    Raises:
        RuntimeError: scontrol is missing, refuses, or does not answer.

    Example:
        >>> import os
        >>> from accel_callbacks.callbacks.preemption import requeue_slurm
        >>> "SLURM_JOB_ID" in os.environ or requeue_slurm() == ""
        True
    """
    job = _job_id()
    if not job:
        return ""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "no message"
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {said}")
    return job


def _job_id() -> str:
    """The number of the job; of an array, of its task."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def read_signals(names: Iterable[str | int]) -> tuple[signal.Signals, ...]:
    """Signals by name or number; names that only other systems have are left out.

    Raises:
        ValueError: no system has such a signal, or it cannot be caught.

    Example:
        >>> from accel_callbacks.callbacks.preemption import read_signals
        >>> [one.name for one in read_signals(["SIGTERM"])]
        ['SIGTERM']
    """
    found = []
    for name in names:
        if not isinstance(name, str):
            found.append(signal.Signals(name))
            continue
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name} cannot be caught: ask the cluster for SIGTERM or SIGUSR1.")
        one = getattr(signal, name, None)
        if isinstance(one, signal.Signals):
            found.append(one)
        elif name not in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT"):  # those Windows lacks
            known = [each.name for each in signal.Signals]
            raise ValueError(f"{name!r} is no signal.{nearest(name, known)}")
    return tuple(found)


class SignalCatcher:
    """Catches the first of each signal; a later one has the effect that it had before.

    Args:
        signals: those to catch.
        patience: seconds after the first signal; then the process ends by it after all.

    Attributes:
        caught: the signal that came first, or ``None``.
        echo: seconds in which the same signal is taken for the first one once more. Clusters send
            theirs to a launcher and to its processes, and the launcher passes it on.

    Example:
        >>> import signal
        >>> from accel_callbacks.callbacks.preemption import SignalCatcher, read_signals
        >>> catcher = SignalCatcher(read_signals(["SIGTERM"]))
        >>> catcher.install()
        True
        >>> signal.raise_signal(signal.SIGTERM)
        >>> catcher.caught.name
        'SIGTERM'
        >>> catcher.restore()
    """

    echo = 5.0

    def __init__(self, signals: Iterable[signal.Signals], patience: float | None = None) -> None:
        self._signals = tuple(signals)
        self._patience = patience
        self._before: dict[int, Any] = {}
        self._came: dict[int, float] = {}
        self._process = 0
        self._given_up = False
        self._deadline: threading.Timer | None = None
        self.caught: signal.Signals | None = None

    def install(self) -> bool:
        """Catch from here on; False outside of the main thread, which alone can."""
        self.restore()
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "signals are caught in the main thread only: they will end this process at once.",
                stacklevel=3,
            )
            return False
        self._process = os.getpid()
        for one in self._signals:
            # What was set outside of Python is reported as None, and cannot be set again.
            self._before[one] = signal.signal(one, self._handle) or signal.SIG_DFL
        return True

    def restore(self) -> None:
        """Catch no more: each signal has the effect that it had before."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._came.clear()
        for number in list(self._before):
            self._restore_one(number)

    def _restore_one(self, number: int) -> None:
        before = self._before.pop(number, signal.SIG_DFL)
        if signal.getsignal(number) == self._handle:  # else somebody has taken it over since
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Only note it: this may interrupt anything."""
        now = time.monotonic()
        if os.getpid() != self._process:
            # A forked child, say a worker of a loader: it works until its parent ends it.
            if signal.Signals(number).name in _DEADLY:
                self._end_by(number)
        elif number not in self._came:
            self._came[number] = now
            self.caught = self.caught or signal.Signals(number)
            if self._patience is not None and self._deadline is None:
                self._deadline = threading.Timer(self._patience, self._give_up, (number,))
                self._deadline.daemon = True
                self._deadline.start()
        elif now - self._came[number] >= self.echo:
            self._end_by(number)

    def _end_by(self, number: int) -> None:
        """The signal has the effect that it had before."""
        self._given_up = True
        self._restore_one(number)
        os.kill(os.getpid(), number)

    def _give_up(self, number: int) -> None:
        """On a thread: the patience is over."""
        self._came[number] = -math.inf
        os.kill(self._process, number)
        time.sleep(_STUCK)
        if not self._given_up:  # the main thread does not come back to Python: no handler will run
            os._exit(128 + number)


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
