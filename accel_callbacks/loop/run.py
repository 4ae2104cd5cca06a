"""TrainingRun: where a run stands, what it measured, and why it stops."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.distributed.votes import Votes
from accel_callbacks.trainer_attributes import TrainerAttributes

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator

__all__ = ["TrainingRun"]

_log = logging.getLogger("accel_callbacks")


class TrainingRun(TrainerAttributes):
    """The state of one training run; the first argument of every hook.

    Its public attributes carry the names of Lightning's trainer, so that a callback which uses
    only those runs in both worlds.

    Attributes:
        name: the name given to ``Accelerator.run`` (or ``"run"``).
        run_id: random name of this run that survives a resume; owns the run's checkpoints.
        global_step: optimizer steps taken; optimizers that take turns in one batch count as one
            step, and steps that fp16 skipped do not count.
        current_epoch: index of the current pass over the training data, from 0.
        first_epoch: the epoch that the next ``epochs`` begins with.
        epochs_done: training epochs finished, those before a resume included.
        max_epochs: what ``epochs`` was called with, or ``None``.
        batch_idx: index of the current training batch in its epoch.
        num_training_batches: batches of a training epoch on this process; ``inf`` if unknown.
        callback_metrics: the last value logged under each name (tensors stay on their device).
        config: what the run was started with.
        data_wait_s: seconds that the training loop has waited for its loader, on this process.
        preempted: the processes have agreed to give way, and the run stops.
        exit_code: set by a callback: after a preemption, the end of ``accel.run`` (or
            ``end_training``) raises ``SystemExit`` with it, once everything is closed.
        interrupted: the run ended with a ``KeyboardInterrupt``.
        votes: what this process asks all of them for.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> with accel.run("demo") as run:
        ...     for epoch in run.epochs(2):
        ...         print(run.current_epoch, run.global_step)
        0 0
        1 0
    """

    def __init__(self, accelerator: Accelerator, name: str = "run") -> None:
        self.accelerator = accelerator
        self.name = name
        self.run_id = uuid.uuid4().hex[:12]
        self.config: dict[str, Any] = {}
        self.global_step = 0
        self.current_epoch = 0
        self.epochs_done = 0
        self.epoch_open = False
        self.max_epochs: int | None = None
        self.batch_idx = -1
        self.num_training_batches: int | float = float("inf")
        self.callback_metrics: dict[str, Any] = {}
        self.resumed_from: str | None = None
        self.first_epoch = 0
        self.loaded_step: int | None = None  # where load_state led, until another run takes it over
        self.data_wait_s = 0.0
        self.save_began: float | None = None  # when the newest save began, by time.perf_counter()
        self.preempted = self.interrupted = False
        self.exit_code: int | None = None
        self.votes = Votes()
        self.may_skip = False
        self.skip_reason: str | None = None
        self._stop_reason: str | None = None
        self._stop_rank = 0
        self._left = False

    def start_over(self) -> None:
        """Stand at the beginning, for another training; name, id and config stay."""
        kept = {name: getattr(self, name) for name in ("run_id", "config")}
        vars(self).update({**vars(TrainingRun(self.accelerator, self.name)), **kept})

    @property
    def begins_anew(self) -> bool:
        """In ``setup``: nothing was loaded and nothing trained, so a callback starts from scratch.

        Not so in the ``setup`` of an evaluation that comes after the end of a run.
        """
        return self.resumed_from is None and self.global_step == 0

    @property
    def awaits_training(self) -> bool:
        """A checkpoint was loaded, and no step was taken since."""
        return self.loaded_step == self.global_step

    # --- stopping -----------------------------------------------------------------------------

    def stop(self, reason: str = "requested") -> None:
        """Ask the run to stop, from any process; all processes stop at the same step.

        With one process it takes effect after the batch, or the gradient window that is open.
        With several, the request is put to the vote at the next step boundary (where a callback
        declares ``can_vote``) or epoch end.

        Args:
            reason: shown at the end of the run and kept in :attr:`stop_reason`.
        """
        if collectives.world_size() == 1:
            self._stopped(reason, 0)
        else:
            self.votes.ask("stop", reason)

    def save_now(self, reason: str = "requested") -> None:
        """Ask for a checkpoint at the next step boundary, from any process.

        Every callback that saves does so, on all processes at the same step; with several
        processes, as for :meth:`stop`, where a callback declares ``can_vote``, or at the end of
        the epoch. Without such a callback there is a warning.

        Args:
            reason: given to the callbacks that save.
        """
        self.votes.ask("save", reason)

    def preempt(self, reason: str = "requested") -> None:
        """Ask all processes to give way: ``on_preempt`` fires on all of them, then the run stops.

        It takes effect where :meth:`save_now` does. May be called in a signal handler.

        Args:
            reason: given to ``on_preempt``, and the :attr:`stop_reason`.
        """
        self.votes.ask("preempt", reason)

    def _stopped(self, reason: str, rank: int) -> None:
        """All processes have agreed to stop; the first reason is kept."""
        if self._stop_reason is None:
            self._stop_reason, self._stop_rank = reason, rank

    @property
    def should_stop(self) -> bool:
        """True once all processes agreed to stop. Assigning ``True`` is a request to stop."""
        return self._stop_reason is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop()
        else:
            self.votes.withdraw("stop")
            self._stop_reason = None

    @property
    def stop_reason(self) -> str | None:
        """Why the run stopped early, ``None`` while it has not."""
        return self._stop_reason

    @property
    def stop_rank(self) -> int:
        """The process that asked for the stop."""
        return self._stop_rank

    def skip_step(self, reason: str = "requested") -> None:
        """Leave this optimizer step out; inside of ``on_before_optimizer_step``, on all processes.

        The gradients stay until ``zero_grad``; the optimizer's ``step_was_skipped`` is True,
        ``global_step`` does not count it, and its scheduler does not move.

        Args:
            reason: written to the log ``"accel_callbacks"``.

        Raises:
            RuntimeError: no optimizer is about to step.
        """
        if not self.may_skip:
            raise RuntimeError("run.skip_step: call it in the hook on_before_optimizer_step.")
        if self.skip_reason is None:
            self.skip_reason = reason
            _log.warning("the step after step %s is left out: %s", self.global_step, reason)

    @property
    def _ending(self) -> str:
        """What the trackers are told of a run that ends without an error."""
        return "interrupted" if self.preempted else "success"

    def _leave(self) -> None:
        """After a preemption, once everything is closed: end the script, if a callback said so."""
        if self.preempted and self.exit_code is not None and not self._left:
            self._left = True
            raise SystemExit(self.exit_code)

    # --- epochs and state ---------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Count epochs up to ``total``; resumes at the right one, ends early on a stop.

        Args:
            total: number of epochs of the whole run, those before a resume included.

        Yields:
            The index of the epoch, from 0.
        """
        return self.accelerator.loop.epochs(total)

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs to go on at this place."""
        return {
            "name": self.name,
            "run_id": self.run_id,
            "global_step": self.global_step,
            "current_epoch": self.current_epoch,
            "epochs_done": self.epochs_done,
            "epoch_open": self.epoch_open,
            "batch_idx": self.batch_idx,
            "metrics": {
                name: value.item() if isinstance(value, torch.Tensor) else value
                for name, value in self.callback_metrics.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where ``state`` was taken."""
        self.run_id = state["run_id"]
        self.global_step = state["global_step"]
        self.current_epoch = state["current_epoch"]
        self.epochs_done = self.first_epoch = state["epochs_done"]
        self.epoch_open = state["epoch_open"]
        self.batch_idx = state["batch_idx"]
        self.callback_metrics.update(state["metrics"])
        self.loaded_step = self.global_step
