"""Our callback in transformers.Trainer."""

from __future__ import annotations

import importlib
import math
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from accel_callbacks.integrations.foreign_trainer import Outward
from accel_callbacks.integrations.host import ForeignHost

__all__ = ["TransformersHost", "to_transformers"]

#: Hooks of ours for which ``transformers.Trainer`` has no event.
_NEVER = (
    "on_before_backward",
    "on_after_backward",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_validation_batch_start",
    "on_exception",
    "on_preempt",
    *(f"on_test_{edge}" for edge in ("start", "epoch_start", "batch_start", "batch_end")),
    *(f"on_test_{edge}" for edge in ("epoch_end", "end")),
)
_FOLDER = "accel_callbacks"


class TransformersHost(ForeignHost):
    """What the Trainer's events have shown last.

    Args:
        trainer: the Trainer, if the user gave it: what is logged goes through it.

    Attributes:
        is_logging: the Trainer is logging what one of our callbacks gave it.
        epoch: index of the epoch; the Trainer's own number is the next one when an epoch ends.
        resumed_from: the checkpoint that training goes on from.

    Example:
        >>> from accel_callbacks.integrations.transformers import TransformersHost
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

    @property
    def bare_models(self) -> list[torch.nn.Module]:
        """The model."""
        return [self._given["model"]]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The Trainer's, without Accelerate's wrapper."""
        optimizer = self._given.get("optimizer")
        return [] if optimizer is None else [getattr(optimizer, "optimizer", optimizer)]

    @property
    def skipped(self) -> bool:
        """The scaler of fp16 has left this step out."""
        return bool(getattr(self._given.get("optimizer"), "step_was_skipped", False))

    @property
    def schedulers(self) -> list[Any]:
        """The Trainer's, without Accelerate's wrapper."""
        scheduler = self._given.get("lr_scheduler")
        return [] if scheduler is None else [getattr(scheduler, "scheduler", scheduler)]

    def metrics(self) -> dict[str, Any]:
        """What was logged."""
        return self._metrics

    @property
    def device(self) -> torch.device:
        """Of the Trainer's arguments."""
        return torch.device(self._args.device)

    def write(self, values: dict[str, Any], step: int) -> None:
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


def to_transformers(callback: Any, *, trainer: Any = None) -> Any:
    """Make one of our callbacks a ``transformers.TrainerCallback``.

    The callback gets a view of the Trainer in the place of its run: the public attributes of
    ``TrainingRun``, ``run.stop``, ``run.save_now`` and ``run.accelerator.log``. What only
    ``accel.run`` has is an error that names it; of hooks for which the Trainer has no event there
    is a warning. Its state is in a folder of each of the Trainer's checkpoints, and taken from
    there where training resumes beneath the same ``output_dir``.

    Args:
        callback: an object with our hooks, or what ``configured`` returned.
        trainer: the Trainer, so that what the callback logs goes to all that it reports to, with
            ``trainer.add_callback(to_transformers(callback, trainer=trainer))``. Without it, that
            goes to ``state.log_history`` only.

    Raises:
        TypeError: it is no callback, or one that saves checkpoints of this library.
        ImportError: transformers is not installed.

    Example:
        >>> from accel_callbacks.callbacks import Checkpoint
        >>> from accel_callbacks.callbacks.adapters import to_transformers
        >>> to_transformers(Checkpoint("runs"))
        Traceback (most recent call last):
        TypeError: Checkpoint cannot run in transformers.Trainer: it saves and restores checkpoints
        of this library, which hold what the Accelerator prepared.
    """
    outward = Outward(callback, TransformersHost(trainer), never=_NEVER)
    try:
        base = importlib.import_module("transformers.trainer_callback").TrainerCallback
    except ImportError as error:
        raise ImportError("this needs transformers: pip install transformers") from error
    return type(f"From{type(outward.callback).__name__}", (_Events, base), {})(outward)


class _Events:
    """The Trainer's events; mixed into its TrainerCallback."""

    def __init__(self, outward: Outward) -> None:
        self.accel_callback = outward.callback
        self._outward = outward
        self._evaluating = self._epoch_ends = False
        self._eval_batches = 0

    def _at(self, args: Any, state: Any, control: Any, given: dict[str, Any]) -> Outward:
        """The view shows this moment."""
        host: Any = self._outward.host
        host.show(args, state, control, given)
        return self._outward

    # --- the life of a run --------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Set up, restored where training resumes, and begun."""
        outward = self._at(args, state, control, given)
        outward.run.begin()
        self._evaluating = self._epoch_ends = False
        host: Any = outward.host
        host.begin_epoch()
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        host.resumed_from = folder if state.global_step > 0 else None
        outward.fire("setup", "fit")
        if host.resumed_from is not None:
            self._restore(folder)
        outward.fire("on_fit_start")
        outward.fire("on_train_start")

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The end hooks."""
        outward = self._at(args, state, control, given)
        self._end_evaluation(outward)
        self._end_epoch(outward)
        outward.fire("on_train_end")
        outward.fire("on_fit_end")
        outward.fire("teardown", "fit")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """An epoch begins."""
        outward = self._at(args, state, control, given)
        self._end_evaluation(outward)
        self._end_epoch(outward)
        host: Any = outward.host
        done = host.begin_epoch()
        outward.begin_epoch()
        outward.run.batch_idx = done - 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """An epoch is over; if the Trainer evaluates after this, that belongs to the epoch."""
        outward = self._at(args, state, control, given)
        self._end_evaluation(outward)
        self._epoch_ends = True
        if control.should_evaluate:
            self._begin_evaluation(outward)
        else:
            self._end_epoch(outward)

    def _end_epoch(self, outward: Outward) -> None:
        if self._epoch_ends:
            self._epoch_ends = False
            outward.end_epoch()

    # --- the step -----------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The first micro-batch of a step; the Trainer does not show it."""
        outward = self._at(args, state, control, given)
        self._end_evaluation(outward)
        self._begin_batch(outward)

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A micro-batch that is not the last of its step."""
        outward = self._at(args, state, control, given)
        outward.fire("on_train_batch_end", None, None, outward.run.batch_idx)
        self._begin_batch(outward)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The last micro-batch; an evaluation may follow at once."""
        outward = self._at(args, state, control, given)
        outward.fire("on_train_batch_end", None, None, outward.run.batch_idx)
        outward.agree()
        if control.should_evaluate:  # the Trainer tells that it will, not when it begins
            self._begin_evaluation(outward)

    def _begin_batch(self, outward: Outward) -> None:
        outward.run.batch_idx += 1
        outward.fire("on_train_batch_start", None, outward.run.batch_idx)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Gradients are clipped already."""
        outward = self._at(args, state, control, given)
        for optimizer in outward.run.optimizers:
            outward.fire("on_before_optimizer_step", optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The Trainer counts this step, and clears the gradients, after this."""
        outward = self._at(args, state, control, given)
        host: Any = outward.host
        for optimizer in outward.run.optimizers:
            if not host.skipped:
                outward.stepped(state.global_step + 1, optimizer)
            outward.fire("on_before_zero_grad", optimizer)

    # --- evaluation ---------------------------------------------------------------------------

    def _begin_evaluation(self, outward: Outward) -> None:
        if not self._evaluating:
            self._evaluating, self._eval_batches = True, 0
            outward.begin_evaluation()

    def _end_evaluation(self, outward: Outward) -> None:
        if self._evaluating:
            self._evaluating = False
            outward.end_evaluation()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A batch of an evaluation was predicted."""
        outward = self._at(args, state, control, given)
        if self._evaluating:
            outward.fire("on_validation_batch_end", None, None, self._eval_batches)
            self._eval_batches += 1

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """An evaluation is over."""
        outward = self._at(args, state, control, given)
        within_training = self._evaluating
        self._end_evaluation(outward)
        if within_training:
            outward.agree()
        self._end_epoch(outward)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """What the Trainer logs."""
        outward = self._at(args, state, control, given)
        host: Any = outward.host
        values = {n: v for n, v in (given.get("logs") or {}).items() if isinstance(v, (int, float))}
        host.metrics().update(values)
        if not host.is_logging:  # else the view calls on_log itself
            outward.fire("on_log", values, state.global_step)

    # --- state --------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Beside what the Trainer has saved."""
        outward = self._at(args, state, control, given)
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        found = outward.state_dict()
        if found and state.is_world_process_zero:
            import checkpoint_io

            checkpoint_io.save(self._place(folder), found)
        outward.fire("on_checkpoint_saved", folder)

    def _restore(self, folder: str) -> None:
        import checkpoint_io

        place = self._place(folder)
        if os.path.isdir(place):
            self._outward.load_state_dict(checkpoint_io.load(place).state)
        elif self._outward.state_dict():
            warnings.warn(f"{self._outward.name} begins anew: it has no {place}", stacklevel=2)

    def _place(self, checkpoint: str) -> str:
        name = re.sub(r"[^\w.=-]", "_", self._outward.name)
        return os.path.join(checkpoint, _FOLDER, name)
