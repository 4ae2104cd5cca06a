"""Preemption: save and stop on a signal, and requeue the SLURM job."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.checkpoint import Checkpoint
from accel_callbacks.callbacks.cloud_notice import CloudNotices
from accel_callbacks.callbacks.interval import Interval
from accel_callbacks.distributed.stack import place_of_thread
from accel_callbacks.errors import nearest
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.addons.resilience.boundary_exit import BoundaryExit
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Preemption", "SignalCatcher", "parse_signals", "requeue_slurm"]

_SCONTROL_TIMEOUT = 60.0  # seconds; the job may be killed at any moment
_NEWEST = "the newest checkpoint"
_LAST_SECONDS = 2.0  # of those that a notice leaves, to end in
_FEW_SECONDS = 10.0  # of a notice, which a clock that differs may make of many
_HANDLER_TIMEOUT = 2.0  # seconds in which the main thread must run a signal's handler
_TERMINATING = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP")  # that parents send to end children


class Preemption(Callback):
    """Save a checkpoint and end the run on a signal, on all ranks at the same step.

    The ranks vote at the end of a step on the first SIGTERM or SIGUSR1 that any of them received;
    several ranks take the next step meanwhile, unless there is a ``grace_period``. An evaluation
    after the epoch's steps is left before its next batch, on all ranks at the same one, and what is
    saved is the state before it; a single process is left while it waits for the workers of its
    loader too. Other code is finished first, and a line says so. Then ``on_preempt`` fires on all
    ranks, in which :class:`Checkpoint` saves and waits until the save is durable; the run stops,
    its end hooks and trackers finish, and leaving ``accel.run`` (or ``end_training``) raises
    ``SystemExit(exit_code)``. Started again, the script resumes.

    Signals are caught from the start to the end of a run, in the main thread; afterwards they have
    their original effect. So has a repeated signal after five seconds or more, but in the save; an
    earlier one is taken for the same signal, forwarded by a launcher. A signal after the last step
    of a run applies to the next run. On Windows nothing asks a process to end: what terminates it
    there, a launcher too, does so at once, and nothing is saved.

    Args:
        signals: by name or number; ``("SIGTERM", "SIGUSR1")`` by default.
        exit_code: of the process; 75 by default, which means "try again later". With ``None`` the
            script continues after the run, and no evaluation is left.
        requeue: ``"slurm"`` to have the main process call ``scontrol requeue`` once all is saved
            (a no-op outside of a SLURM job), a function of the run, or ``None`` (the default).
        grace_period: maximum time from the signal to the end of the run, as an interval such as
            ``"90 s"``; after it the signal ends the process as if it were not caught. ``None`` (the
            default) waits for the step, however long it takes.
        notices: of which clouds the notices that they take the machine back are read: ``"aws"``,
            ``"gce"``, ``"azure"``, or several; none by default, and then no request is made. One
            process of each machine asks its metadata address every three seconds. A notice is
            treated as a signal; the seconds that it leaves are the grace period, if they are fewer.
        metadata_address: of all of them; that of the variable ``ACCEL_METADATA_ADDRESS``, or of
            the clouds, if ``None``.

    Attributes:
        received: the signal or notice that this process received, or ``None``.

    Raises:
        ValueError: an unknown signal, exit code, ``requeue`` or cloud, a period that is not a time,
            or an address that is no URL.

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
    runs_last = True  # the job is requeued after the save
    after = (Checkpoint,)

    def __init__(
        self,
        signals: Sequence[str | int] = ("SIGTERM", "SIGUSR1"),
        exit_code: int | None = 75,
        requeue: str | Callable[[TrainingRun], Any] | None = None,
        grace_period: str | float | timedelta | None = None,
        notices: str | Sequence[str] = (),
        metadata_address: str | None = None,
    ) -> None:
        if isinstance(requeue, str) and requeue != "slurm":
            raise ValueError(f"requeue={requeue!r} is unknown; use 'slurm' or a function.")
        if exit_code is not None and not 0 <= exit_code <= 255:
            raise ValueError(f"exit_code={exit_code} must be from 0 to 255, or None.")
        listed = (signals,) if isinstance(signals, (str, int)) else signals
        patience = None if grace_period is None else Interval.seconds(grace_period, "grace_period")
        self.exit_code = exit_code
        self.requeue = requeue
        # One step later may be too late for the save.
        self.votes_at_once = grace_period is not None
        # Without a code the script goes on after its loops, so they end in order.
        self._leaves_runs = exit_code is not None
        self._run: TrainingRun | None = None
        self._boundary_exit: BoundaryExit | None = None  # within accel.run alone
        self._told = False  # what goes on before the run can stop
        clouds = (notices,) if isinstance(notices, str) else notices
        self._notices = CloudNotices(clouds, metadata_address) if clouds else None
        self._catcher = SignalCatcher(
            parse_signals(listed),
            patience,
            interrupt=self._interrupt,
            holds=self._saves,
            resumes_from=self._newest_state,
        )

    @property
    def received(self) -> str | None:
        """The name of the signal that this process received, or its notice, or ``None``."""
        return self._catcher.reason

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Catch the signals."""
        self._run, self._boundary_exit, self._told = run, None, False
        self._catcher.install()
        if self._notices is not None and run.local_rank == 0:
            self._notices.start(lambda notice: self._catcher.announce(str(notice), notice.seconds))

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Request a preemption for a signal received during a restore, or after the last run."""
        # A loop outside of accel.run, and one of a foreign trainer, have no end to unwind to.
        if self._leaves_runs and getattr(run, "prepared_at_start", None) is not None:
            from accel_callbacks.addons.resilience.boundary_exit import BoundaryExit

            self._boundary_exit = BoundaryExit(run)
        if self.received is not None:
            run.preempt(self.received)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Request a preemption of all ranks at this step, if a signal was received."""
        if self.received is not None:
            run.preempt(self.received)

    def on_validation_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Leave the evaluation on all ranks before this batch, if a signal was received."""
        if self._boundary_exit is not None:
            self._boundary_exit.before_batch(self.received)

    on_test_batch_start = on_validation_batch_start

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Request it for a signal received during a validation that could not be left."""
        if self.received is not None and not run.preempted:
            run.preempt(self.received)

    def on_preempt(self, run: TrainingRun, model: Any, reason: str) -> None:
        """Set the exit code, and requeue the job on the main process; all is saved by now."""
        self._catcher.caught = self._catcher.notice = None
        run.exit_code = self.exit_code
        if self.requeue is not None and run.is_global_zero:
            self._requeue(run)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Restore the original signal handlers."""
        self._run = self._boundary_exit = None
        if self._notices is not None:
            self._notices.stop()
        self._catcher.restore()
        if self.received is not None:
            _notify(f"{self.received} came too late to stop this run; it will preempt the next one")

    def _interrupt(self) -> None:
        """Leave the run if it waits, or say what is finished first; in the handler of a signal."""
        run, reason = self._run, str(self.received)
        if run is None or run.preempted:
            return
        if self._boundary_exit is not None:
            run.preempt(reason)  # for the next vote, if it cannot be left here
            self._boundary_exit.interrupt(reason)
        rest = "" if self._told or run.local_rank else _between_steps(run)
        if rest:
            self._told = True
            limit = self._catcher.limit
            ends = "" if limit == math.inf else f", or it ends {limit:.3g} s after the signal"
            with suppress(RuntimeError):  # the signal has come inside of a write to stderr
                _notify(
                    f"{reason}: {rest} goes on to the next place where the run can stop (a batch "
                    "of an evaluation, the end of a step or of the epoch), and the state of the "
                    f"last boundary is saved there{ends}"
                )

    def _saves(self) -> bool:
        """Return whether the preemption is being carried out."""
        return self._run is not None and self._run.preempted

    def _newest_state(self) -> str:
        """Return what a restart resumes from, if this process ends now."""
        savers = [] if self._run is None else self._run.checkpoint_callbacks
        if any(getattr(saver, "preempted_in_memory", False) for saver in savers):
            return (
                "the state in memory, if it is of this launch, else the newest checkpoint: the "
                "time was too short for the store"
            )
        return _NEWEST

    def _requeue(self, run: TrainingRun) -> None:
        try:
            if callable(self.requeue):
                self.requeue(run)
            elif job := requeue_slurm():
                _notify(f"job {job} is requeued")
        except Exception as error:  # all is saved, and the exit code still asks for a restart
            problem = f"{type(error).__name__}: {error}"
            warn(f"the job could not be requeued: {problem}")


def _between_steps(run: TrainingRun) -> str:
    """Return what goes on between two steps, empty in a step or where another library trains."""
    loop = run.accelerator.loop
    if loop.evaluating:
        return "the evaluation"
    position = getattr(loop, "position", None)  # another library's trainer has none
    in_step = position is None or position.outer is not None or loop.own_batches.is_open
    return "" if in_step else "the code between two steps"


def _notify(text: str) -> None:
    print(f"[accel] {text}", file=sys.stderr, flush=True)


class SignalCatcher:
    """Catch the first of each signal; a repeated one has its original effect.

    Args:
        signals: those to catch.
        patience: seconds after the first signal, after which the signal ends the process.
        interrupt: called at the end of the handler of the first signal.
        holds: returns whether a repeated signal is to be ignored now, as in a save.
        resumes_from: returns what a restart resumes from, for the message at the deadline.

    Attributes:
        caught: the first signal that was received, or ``None``.
        notice: what was announced in place of a signal, or ``None``.
        limit: seconds from the first signal to the end of the process, infinite without a deadline.
        echo: seconds in which a repeated signal is ignored. Clusters send theirs to a launcher and
            to its processes, and the launcher forwards it.
    """

    echo = 5.0

    def __init__(
        self,
        signals: Iterable[signal.Signals],
        patience: float | None = None,
        *,
        interrupt: Callable[[], None] = lambda: None,
        holds: Callable[[], bool] = lambda: False,
        resumes_from: Callable[[], str] = lambda: _NEWEST,
    ) -> None:
        self._signals = tuple(signals)
        self._patience = patience
        self._interrupt, self._holds, self._resumes_from = interrupt, holds, resumes_from
        self._original: dict[int, Any] = {}  # handlers
        self._received_at: dict[int, float] = {}
        self._pid = 0
        self._delivered = False
        self._deadline: threading.Timer | None = None
        self._restoring = threading.Lock()
        self.limit = math.inf
        self._announced: float | None = None  # the seconds of a notice that no handler has seen
        self.caught: signal.Signals | None = None
        self.notice: str | None = None

    @property
    def reason(self) -> str | None:
        """What was received first, or ``None``."""
        return self.notice or (None if self.caught is None else self.caught.name)

    def install(self) -> bool:
        """Install the handlers; returns False outside of the main thread, where Python cannot."""
        self.restore()
        if threading.current_thread() is not threading.main_thread():
            warn(
                "signals are only caught in the main thread: they will end this process at once.",
            )
            return False
        self._pid = os.getpid()
        for number in self._signals:
            # A handler set outside of Python is reported as None, and cannot be set again.
            self._original[number] = signal.signal(number, self._handle) or signal.SIG_DFL
        return True

    def restore(self) -> None:
        """Restore the original handlers."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._received_at.clear()
        self.limit, self._announced = math.inf, None
        with self._restoring:
            for number in list(self._original):
                self._restore_one(number)

    def _restore_one(self, number: int) -> None:
        original = self._original.pop(number, signal.SIG_DFL)
        if signal.getsignal(number) == self._handle:  # not if replaced since
            signal.signal(number, original)

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Record the signal; what more is done depends on what was interrupted."""
        now = time.monotonic()
        if os.getpid() != self._pid:
            # A forked child, such as a loader's worker, runs until its parent ends it.
            if signal.Signals(number).name in _TERMINATING:
                self._deliver(number)
        elif self._announced is not None:
            # No signal was sent: one that follows, as the machine is shut down, is the first.
            seconds, self._announced = self._announced, None
            self._end_within(
                number, seconds - _LAST_SECONDS if seconds > _FEW_SECONDS else math.inf
            )
            self._interrupt()
        elif number not in self._received_at:
            self._received_at[number] = now
            first, self.caught = self.caught is None, self.caught or signal.Signals(number)
            self._end_within(number, math.inf)
            if first:  # several signals are one preemption
                self._interrupt()
        elif now - self._received_at[number] >= (math.inf if self._holds() else self.echo):
            self._deliver(number)  # in a save too where the patience is exceeded

    def announce(self, notice: str, seconds: float) -> None:
        """Treat a notice as a signal; called on a thread.

        Args:
            notice: what is announced, for messages.
            seconds: until the machine is gone.
        """
        if self.reason is None:
            self.notice = notice
        with self._restoring:
            if not self._original:
                return  # nothing is caught: the hooks of the run see the notice
            self._announced = seconds
            number = next(iter(self._original))
            if sys.platform == "win32":
                signal.raise_signal(number)
            else:
                # To the main thread, so that its waits end too.
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _end_within(self, number: int, seconds: float) -> None:
        """End the process after the patience, or after some seconds if they are fewer."""
        limit = min(seconds, math.inf if self._patience is None else self._patience)
        if limit >= self.limit:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self.limit = limit
        self._deadline = threading.Timer(limit, self._force, (number,))
        self._deadline.daemon = True
        self._deadline.start()

    def _deliver(self, number: int) -> None:
        """Raise the signal again with its original handler."""
        self._delivered = True
        self._restore_one(number)
        os.kill(os.getpid(), number)

    def _force(self, number: int) -> None:
        """End the process by the signal; runs on a thread when the patience is exceeded."""
        place = place_of_thread(threading.main_thread())
        _notify(
            f"{self.limit:.3g} s after {self.reason} this process is still at "
            f"{place or 'the same place'}, and ends: a restart resumes from {self._resumes_from()}"
        )
        self._received_at[number] = -math.inf
        os.kill(self._pid, number)
        time.sleep(_HANDLER_TIMEOUT)
        # The main thread does not return to the interpreter, so Python runs no signal handler.
        if not self._delivered:
            os._exit(128 + number)


def parse_signals(names: Iterable[str | int]) -> tuple[signal.Signals, ...]:
    """Return signals by name or number, without those that only other systems have.

    Raises:
        ValueError: no system has such a signal, or it cannot be caught.
    """
    signals = []
    for name in names:
        if not isinstance(name, str):
            signals.append(signal.Signals(name))
            continue
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name} cannot be caught: ask the cluster for SIGTERM or SIGUSR1.")
        number = getattr(signal, name, None)
        if isinstance(number, signal.Signals):
            signals.append(number)
        elif name not in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT"):  # which Windows lacks
            known = [each.name for each in signal.Signals]
            raise ValueError(f"{name!r} is not a signal.{nearest(name, known)}")
    return tuple(signals)


def requeue_slurm() -> str:
    """Call ``scontrol requeue`` on this job, or on this task of a job array.

    Returns:
        The id of the job; empty outside of SLURM.

    Raises:
        RuntimeError: scontrol is missing, fails or times out, or the id is not one of SLURM.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    if not job:
        return ""
    if re.fullmatch(r"[0-9]+([_+][0-9]+)?", job) is None:
        raise RuntimeError(f"{job[:80]!r} is not the id of a SLURM job: unset SLURM_JOB_ID")
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        message = (done.stderr or done.stdout).strip() or "no message"
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {message}")
    return job
