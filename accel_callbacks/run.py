"""TrainingRun: where a run stands, what it measured, and why it stops."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from loggers import Tracker

__all__ = ["TrainingRun"]


class TrainingRun:
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

    Example:
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> with accel.run("demo") as run:
        ...     for epoch in run.epochs(2):
        ...         print(run.current_epoch, run.global_step)
        0 0
        1 0
    """

    sanity_checking = False

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
        self._stop_request: str | None = None
        self._stop_reason: str | None = None

    def start_over(self) -> None:
        """Stand at the beginning, for another training; name, id and config stay."""
        kept = {name: getattr(self, name) for name in ("run_id", "config")}
        vars(self).update({**vars(TrainingRun(self.accelerator, self.name)), **kept})

    @property
    def awaits_training(self) -> bool:
        """A checkpoint was loaded, and no step was taken since."""
        return self.loaded_step == self.global_step

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.accelerator.is_main_process

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The same as ``callback_metrics``; Lightning's other name for it."""
        return self.callback_metrics

    @property
    def loggers(self) -> list[Tracker]:
        """The trackers of this run; empty off the main process."""
        return self.accelerator.trackers

    @property
    def logger(self) -> Tracker | None:
        """The first tracker, if there is one."""
        return self.loggers[0] if self.loggers else None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The prepared optimizers, in the order of ``prepare``."""
        return list(self.accelerator.optimizers)

    @property
    def models(self) -> list[torch.nn.Module]:
        """The prepared models as the user built them."""
        return self.accelerator.bare_models

    # --- stopping -----------------------------------------------------------------------------

    def stop(self, reason: str = "requested") -> None:
        """Ask the run to stop, from any process; all processes stop at the same step.

        With one process it takes effect after the batch, or the gradient window that is open.
        With several, the request is put to the vote at the next step boundary (where a callback
        declares ``can_vote``) or epoch end.

        Args:
            reason: shown at the end of the run and kept in :attr:`stop_reason`.
        """
        self._stop_request = self._stop_request or reason
        if collectives.world_size() == 1:
            self._stop_reason = self._stop_reason or self._stop_request

    @property
    def should_stop(self) -> bool:
        """True once all processes agreed to stop. Assigning ``True`` is a request to stop."""
        return self._stop_reason is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop()
        else:
            self._stop_request = self._stop_reason = None

    @property
    def stop_reason(self) -> str | None:
        """Why the run stopped early, ``None`` while it has not."""
        return self._stop_reason

    def agree(self) -> None:
        """Collective: stop everywhere if any process asked for it (one small all-reduce)."""
        if self._stop_reason is None and collectives.any_process(self._stop_request is not None):
            reasons = collectives.all_objects(self._stop_request)
            self._stop_reason = next(reason for reason in reasons if reason is not None)

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
