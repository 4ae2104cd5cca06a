"""StepState and RunFlags: the optimizer step under way, and what has begun in the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_callbacks.errors import ResumeError

if TYPE_CHECKING:
    import torch

    from accel_callbacks.loop.run import TrainingRun
    from accel_callbacks.precision.base import StepFinding

__all__ = [
    "RunFlags",
    "StepState",
]

_PATIENCE = 2.0  # seconds that an error waits for the device to tell which steps were skipped


@dataclass(slots=True)
class StepState:
    """The training batch that is worked on, and the optimizers that step in it.

    Attributes:
        worked: True once the current training batch was trained on.
        last_loss: of the batch, kept only for a callback that gets it.
        stepped: optimizers that stepped since the global step was last counted.
        unsettled: steps to be counted once the device tells whether they were skipped, and None
            where a batch began.
        after_step: called with each optimizer that has stepped, None if nobody is to know.
        note_norm: called with each norm that gradients are clipped by, None if nobody is to know.
        before_work: called with the name of the next backward or step, None if nothing is to be
            checked.
        half_loaded: the checkpoint whose load failed after it had changed something.
        borrowed: the checkpoint whose weights the models hold for an evaluation.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.loop.step_state import StepState
        >>> run, step = Accelerator(cpu=True).current_run, StepState()
        >>> for optimizer in ("generator", "critic", "generator"):
        ...     step.count(run, optimizer)
        >>> run.global_step
        2
    """

    worked: bool = False
    last_loss: torch.Tensor | None = None
    stepped: tuple[Any, ...] = ()
    unsettled: deque[tuple[Any, StepFinding] | None] = field(default_factory=deque)
    after_step: Callable[[Any], None] | None = None
    note_norm: Callable[[torch.Tensor], None] | None = None
    before_work: Callable[[str], None] | None = None
    half_loaded: str | None = None
    borrowed: str | None = None

    # --- what forbids the next step -----------------------------------------------------------

    def set_half_loaded(self, path: str | None) -> None:
        """Refuse backward and step until a load succeeds; None ends that.

        Args:
            path: the checkpoint whose load has begun to change something.
        """
        self.half_loaded = path
        # A function that is there only while it is needed: else a step pays one test of None.
        self.before_work = None if path is None else self.require_loaded

    def require_loaded(self, action: str) -> None:
        """Raise ResumeError if the last ``load_state`` failed midway.

        Args:
            action: the method that would use the mixed state, for the message.

        Example:
            >>> from accel_callbacks.loop.step_state import StepState
            >>> step = StepState()
            >>> step.set_half_loaded("runs/step-1")
            >>> step.require_loaded("backward")
            Traceback (most recent call last):
            accel_callbacks.errors.ResumeError: backward: loading runs/step-1 failed midway, and \
models and optimizers hold a mixture of it and of their state before. Load a checkpoint first: \
load_state() takes the newest valid one.
        """
        if self.half_loaded is not None:
            raise ResumeError(
                f"{action}: loading {self.half_loaded} failed midway, and models and optimizers "
                "hold a mixture of it and of their state before. Load a checkpoint first: "
                "load_state() takes the newest valid one."
            )

    def require_own_weights(self, action: str) -> None:
        """Raise RuntimeError while the models hold the weights of a checkpoint, for an evaluation.

        Args:
            action: the method that would use or change the training state, for the message.

        Example:
            >>> from accel_callbacks.loop.step_state import StepState
            >>> StepState().require_own_weights("save_state")
        """
        if self.borrowed is not None:
            raise RuntimeError(
                f"{action}: the models hold the weights of {self.borrowed}, for "
                "evaluate(checkpoint=...). Call it after that block, which puts the weights of "
                "the run back; save_model() works inside too."
            )

    # --- the count of steps -------------------------------------------------------------------

    def count(self, run: TrainingRun, optimizer: Any) -> None:
        """Count an optimizer step; optimizers that alternate within one batch count as one."""
        if run.settle_steps is not None:
            run.settle_steps()
        # The same optimizer twice in one batch is two steps, as in several passes over one batch.
        stepped = self.stepped
        if stepped and optimizer not in stepped:
            self.stepped = (*stepped, optimizer)
        else:
            run._global_step += 1  # not through the property: this is the hot path
            self.stepped = (optimizer,)

    def count_later(
        self, run: TrainingRun, optimizer: Any, finding: StepFinding, ahead: int
    ) -> None:
        """Count an optimizer step once it is read whether it was skipped.

        Args:
            run: counts it.
            optimizer: has stepped, unless it was skipped.
            finding: tells that, and may wait for the device.
            ahead: as many of the newest steps are not waited for.
        """
        self.unsettled.append((optimizer, finding))
        self._settle(run, ahead)

    def settle(self, run: TrainingRun) -> None:
        """Count the steps of :meth:`count_later`, in their order; waits for the device."""
        if self.unsettled:
            self._settle(run, 0)

    def settle_after_error(self, run: TrainingRun) -> None:
        """Count the steps while an error unwinds, unless the device fails or hangs too."""
        findings = [step[1] for step in self.unsettled if step is not None]
        deadline = time.monotonic() + _PATIENCE
        with suppress(Exception):
            while not (ready := all(finding.is_ready for finding in findings)):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
            if ready:
                self.settle(run)
        # What was not read by now is not counted, as the device may never tell.
        self.unsettled.clear()
        run.settle_steps = None

    def _settle(self, run: TrainingRun, keep: int) -> None:
        """Count steps until findings of no more than ``keep`` are left to be read."""
        waiting = self.unsettled
        left = sum(step is not None for step in waiting)
        run.settle_steps = None  # counting asks for the steps so far
        while waiting and (left > keep or waiting[0] is None):
            step = waiting.popleft()
            if step is None:  # a batch began here
                self.stepped = ()
                continue
            left -= 1
            optimizer, finding = step
            if finding.stepped:
                self.count(run, optimizer)
        run.settle_steps = partial(self.settle, run) if waiting else None


# --- runFlags: what has begun and what is over in the life of a run ------------------------------


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
