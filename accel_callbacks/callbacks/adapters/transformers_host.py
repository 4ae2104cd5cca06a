"""``transformers.Trainer`` as a host of our callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from accel_callbacks.callbacks.adapters.host import Host

__all__ = ["TransformersHost"]


class TransformersHost(Host):
    """What the Trainer's events have shown last.

    Args:
        trainer: the Trainer, if the user gave it: what is logged goes through it.

    Attributes:
        is_logging: the Trainer is logging what one of our callbacks gave it.
        epoch: index of the epoch; the Trainer's own number is the next one when an epoch ends.
        resumed_from: the checkpoint that training goes on from.

    Example:
        >>> from accel_callbacks.callbacks.adapters.transformers_host import TransformersHost
        >>> TransformersHost().title
        'transformers.Trainer'
    """

    title = "transformers.Trainer"
    can_save = True

    def __init__(self, trainer: Any = None) -> None:
        self.is_logging = False
        self.epoch = 0
        self.resumed_from: str | None = None
        self._trainer = trainer
        self._args: Any = None
        self._state: Any = None
        self._control: Any = None
        self._given: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}

    def show(self, args: Any, state: Any, control: Any, given: dict[str, Any]) -> None:
        """An event's arguments; what it leaves out stays as it was."""
        self._args, self._state, self._control = args, state, control
        self._given.update({name: value for name, value in given.items() if value is not None})

    def get(self, name: str) -> Any:
        """From the Trainer's arguments and state."""
        return _ATTRIBUTES[name](self)

    def models(self) -> list[torch.nn.Module]:
        """The model."""
        return [self._given["model"]]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The Trainer's, without Accelerate's wrapper."""
        optimizer = self._given.get("optimizer")
        return [] if optimizer is None else [getattr(optimizer, "optimizer", optimizer)]

    @property
    def skipped(self) -> bool:
        """The scaler of fp16 has left this step out."""
        return bool(getattr(self._given.get("optimizer"), "step_was_skipped", False))

    def schedulers(self) -> list[Any]:
        """The Trainer's, without Accelerate's wrapper."""
        scheduler = self._given.get("lr_scheduler")
        return [] if scheduler is None else [getattr(scheduler, "scheduler", scheduler)]

    def metrics(self) -> dict[str, Any]:
        """What was logged."""
        return self._metrics

    def device(self) -> torch.device:
        """Of the Trainer's arguments."""
        return torch.device(self._args.device)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Through the Trainer; without it into the history of its state."""
        numbers = {n: float(v) if not isinstance(v, str) else v for n, v in values.items()}
        if self._trainer is None:
            epoch = self._state.epoch
            self._state.log_history.append({**numbers, "epoch": epoch, "step": step})
            return
        state, control = self._state, self._control
        asked, counted = control.should_log, state.global_step  # logging takes the wish back
        self.is_logging, state.global_step = True, step
        try:
            self._trainer.log(numbers)
        finally:
            self.is_logging, state.global_step = False, counted
            control.should_log = asked

    def stop(self, reason: str) -> None:
        """``control.should_training_stop``."""
        self._control.should_training_stop = True

    def save_now(self, reason: str) -> None:
        """``control.should_save``, after this step."""
        self._control.should_save = True

    def accumulate(self, batches: int) -> None:
        """From the next window on, as far as the Trainer looks again: at the next epoch."""
        self._args.gradient_accumulation_steps = batches

    # --- what get() knows ---------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """An epoch begins, or goes on after a resume; returns how many batches are done of it."""
        done = float(self._state.epoch or 0.0)
        self.epoch = int(done + 1e-9)
        batches = self._batches("train_dataloader")
        return 0 if math.isinf(batches) else round((done - self.epoch) * batches)

    @property
    def is_last_batch(self) -> bool:
        """After a step: it was the last of its epoch."""
        return float(self._state.epoch or 0.0) >= self.epoch + 1 - 1e-9

    def _batches(self, loader: str) -> int | float:
        try:
            return len(self._given[loader])
        except (KeyError, TypeError):
            return float("inf")

    def _precision(self) -> str:
        args = self._args
        return "bf16-mixed" if args.bf16 else "16-mixed" if args.fp16 else "32-true"


_ATTRIBUTES: dict[str, Callable[[TransformersHost], Any]] = {
    "global_step": lambda host: host._state.global_step,
    "current_epoch": lambda host: host.epoch,
    "first_epoch": lambda host: 0,
    "max_epochs": lambda host: host._state.num_train_epochs,
    "max_steps": lambda host: host._state.max_steps,
    "num_training_batches": lambda host: host._batches("train_dataloader"),
    "num_val_batches": lambda host: [host._batches("eval_dataloader")],
    "num_test_batches": lambda host: [],
    "train_dataloader": lambda host: host._given.get("train_dataloader"),
    "is_last_batch": lambda host: host.is_last_batch,
    "resumed_from": lambda host: host.resumed_from,
    "precision": lambda host: host._precision(),
    "accumulate_grad_batches": lambda host: host._args.gradient_accumulation_steps,
    "default_root_dir": lambda host: host._args.output_dir,
    "log_dir": lambda host: host._args.output_dir,
    "local_rank": lambda host: host._args.local_rank,
}
