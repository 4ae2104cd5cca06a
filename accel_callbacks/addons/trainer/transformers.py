"""to_transformers: one of our callbacks as a callback of transformers.Trainer."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accel_callbacks.addons.hosts.foreign_trainer import HostedCallback
from accel_callbacks.addons.hosts.host import ForeignHost
from accel_callbacks.callbacks.checkpoint import Checkpoint
from checkpoint_io.warning import warn

__all__ = ["TrainerEvents", "TransformersHost", "to_transformers"]

#: Our hooks for which ``transformers.Trainer`` has no event.
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
_FOLDER = "accel_callbacks"  # in each of the Trainer's checkpoints


def to_transformers(callback: Any, *, trainer: Any = None) -> Any:
    """Wrap one of our callbacks as a ``transformers.TrainerCallback``.

    Its hooks get a run over the Trainer: the public attributes of ``TrainingRun``, ``run.stop``,
    ``run.save_now`` and ``run.accelerator.log``. A name that only ``accel.run`` has raises an error
    that names it; a hook for which the Trainer has no event causes a warning. The callback's state
    is saved in a folder of each of the Trainer's checkpoints, and restored when training resumes
    from one in the same ``output_dir``.

    A tracker gets what the Trainer logs, and the arguments; its files are in ``output_dir``.

    A ``Checkpoint`` lets the Trainer save at its intervals, and copies each of the Trainer's
    checkpoints into its folder or URL, where its numbers say which are kept. The newest copy is
    fetched into ``output_dir`` at once, unless that has one as new, so that
    ``trainer.train(resume_from_checkpoint=True)`` goes on from it.

    Args:
        callback: an object with our hooks, or what ``configured`` returned; or a tracker: its name,
            its class, an instance, or what ``configured_tracker`` returned.
        trainer: the Trainer, so that values that the callback logs go to all that it reports to,
            with ``trainer.add_callback(to_transformers(callback, trainer=trainer))``. Without it,
            they go to ``state.log_history`` only.

    Raises:
        TypeError: it is not a callback, one that saves checkpoints by itself, or a ``Checkpoint``
            without the Trainer.
        ValueError: an option of a ``Checkpoint`` needs ``accel.run``; or it has no ``dirpath``.
        ImportError: transformers is not installed.

    Example:
        >>> from accel_callbacks.callbacks import Checkpoint
        >>> from accel_callbacks.callbacks.adapters import to_transformers
        >>> to_transformers(Checkpoint("runs"))
        Traceback (most recent call last):
        TypeError: Checkpoint fetches the newest copy into the Trainer's folder: call
        to_transformers(Checkpoint(...), trainer=trainer), before trainer.train.
    """
    if isinstance(callback, str) or _is_tracker(callback):
        from accel_callbacks.addons.hosts.hosted_tracker import HostedTracker

        callback = HostedTracker(callback)
    elif isinstance(callback, Checkpoint):
        from accel_callbacks.addons.trainer.hosted_checkpoint import HostedCheckpoint

        callback = HostedCheckpoint(callback, trainer)
    host = TransformersHost(trainer)
    hosted = HostedCallback(callback, host, never=_NEVER)
    try:
        base = importlib.import_module("transformers.trainer_callback").TrainerCallback
    except ImportError as error:
        raise ImportError("this needs transformers: pip install transformers") from error
    return type(f"From{type(hosted.callback).__name__}", (TrainerEvents, base), {})(hosted, host)


def _is_tracker(item: Any) -> bool:
    """Return whether something is a class of a tracker of ours, an instance, or made for one."""
    bases = (item if isinstance(item, type) else type(item)).__mro__
    return any(
        base.__name__ in ("Tracker", "ConfiguredTracker") and base.__module__.startswith("loggers.")
        for base in bases
    )


class TrainerEvents:
    """The Trainer's events, which fire our hooks; mixed into its TrainerCallback."""

    def __init__(self, hosted: HostedCallback, host: TransformersHost) -> None:
        self.accel_callback = hosted.callback
        self._hosted, self._host = hosted, host
        self._evaluating = self._epoch_ends = self._told_preempted = False
        self._eval_batches = 0
        self._saved_into = ""  # the name of the checkpoint that has the callback's state already

    def _bind(
        self, args: Any, state: Any, control: Any, objects: Mapping[str, Any] | None = None
    ) -> HostedCallback:
        """Return the callback over the Trainer as it is at this event.

        The events of a step, the hot ones, leave out its model, optimizer and loaders: they are
        those of the event before.
        """
        self._host.bind(args, state, control)
        if objects is not None:
            self._host.bind_objects(objects)
        return self._hosted

    # --- start and end ------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire ``setup``, restore the state if training resumes, and fire the start hooks."""
        hosted = self._bind(args, state, control, objects)
        hosted.run.begin()
        self._evaluating = self._epoch_ends = self._told_preempted = False
        self._host.begin_epoch()
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        self._host.resumed_from = folder if state.global_step > 0 else None
        hosted.fire("setup", "fit")
        if self._host.resumed_from is not None:
            self._restore(folder)
        hosted.fire("on_fit_start")
        hosted.fire("on_train_start")

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire the end hooks."""
        hosted = self._bind(args, state, control, objects)
        self._end_evaluation(hosted)
        self._end_epoch(hosted)
        hosted.fire("on_train_end")
        hosted.fire("on_fit_end")
        hosted.fire("teardown", "fit")
        if hosted.run.preempted and hosted.run.exit_code is not None:
            raise SystemExit(hosted.run.exit_code)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire ``on_train_epoch_start``, after the end hooks of the epoch before."""
        hosted = self._bind(args, state, control, objects)
        self._end_evaluation(hosted)
        self._end_epoch(hosted)
        done = self._host.begin_epoch()
        hosted.begin_epoch()
        hosted.run.batch_idx = done - 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire ``on_train_epoch_end``, or defer it until after the evaluation of the epoch."""
        hosted = self._bind(args, state, control, objects)
        self._end_evaluation(hosted)
        self._epoch_ends = True
        if hosted.run.preempted and not self._host.is_last_batch:
            # In the middle of an epoch all is saved, and the time is short.
            control.should_evaluate = control.should_save = False
        if control.should_evaluate:
            self._begin_evaluation(hosted)
        else:
            self._end_epoch(hosted)

    def _end_epoch(self, hosted: HostedCallback) -> None:
        if self._epoch_ends:
            self._epoch_ends = False
            hosted.end_epoch()

    # --- the step -----------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire ``on_train_batch_start`` of the first micro-batch, without the batch."""
        hosted = self._bind(args, state, control)
        self._end_evaluation(hosted)
        self._begin_batch(hosted)

    def on_substep_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire the hooks between two micro-batches of a step."""
        hosted = self._bind(args, state, control)
        hosted.fire("on_train_batch_end", None, None, hosted.run.batch_idx)
        self._begin_batch(hosted)

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire ``on_train_batch_end`` for the last micro-batch; an evaluation may follow."""
        hosted = self._bind(args, state, control)
        hosted.fire("on_train_batch_end", None, None, hosted.run.batch_idx)
        hosted.agree()
        if control.should_evaluate:  # there is no event at the start of an evaluation
            self._begin_evaluation(hosted)

    def _begin_batch(self, hosted: HostedCallback) -> None:
        hosted.run.batch_idx += 1
        hosted.fire("on_train_batch_start", None, hosted.run.batch_idx)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire ``on_before_optimizer_step``, with gradients that are clipped already."""
        hosted = self._bind(args, state, control)
        for optimizer in hosted.run.optimizers:
            hosted.fire("on_before_optimizer_step", optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire the hooks after the step; the Trainer counts it and clears gradients later."""
        hosted = self._bind(args, state, control)
        for optimizer in hosted.run.optimizers:
            if not self._host.skipped:
                hosted.stepped(state.global_step + 1, optimizer)
            hosted.fire("on_before_zero_grad", optimizer)

    # --- evaluation ---------------------------------------------------------------------------

    def _begin_evaluation(self, hosted: HostedCallback) -> None:
        if not self._evaluating:
            self._evaluating, self._eval_batches = True, 0
            hosted.begin_evaluation()

    def _end_evaluation(self, hosted: HostedCallback) -> None:
        if self._evaluating:
            self._evaluating = False
            hosted.end_evaluation()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire ``on_validation_batch_end``, in an evaluation within training."""
        hosted = self._bind(args, state, control)
        if self._evaluating:
            hosted.fire("on_validation_batch_end", None, None, self._eval_batches)
            self._eval_batches += 1

    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire the end hooks of the evaluation, and those of the epoch if they were deferred."""
        hosted = self._bind(args, state, control, objects)
        within_training = self._evaluating
        self._end_evaluation(hosted)
        if within_training:
            hosted.agree()
        self._end_epoch(hosted)

    def on_log(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fire ``on_log`` with the numbers that the Trainer logs."""
        hosted = self._bind(args, state, control, objects)
        values = {
            n: v for n, v in (objects.get("logs") or {}).items() if isinstance(v, (int, float))
        }
        self._host.metrics().update(values)
        if not self._host.is_logging:  # else ForeignHost.log fires it
            hosted.fire("on_log", values, state.global_step)

    # --- state --------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save the callback's state into the Trainer's checkpoint, and fire the hook."""
        hosted = self._bind(args, state, control, objects)
        name = f"checkpoint-{state.global_step}"
        folder = os.path.join(args.output_dir, name)
        if self._saved_into != name:
            self.save_into(folder, state)
        self._saved_into = ""
        hosted.fire("on_checkpoint_saved", folder)
        if hosted.run.preempted and not self._told_preempted:
            self._told_preempted = True
            hosted.fire("on_preempt", hosted.run.stop_reason)

    def save_into(self, folder: str, state: Any) -> None:
        """Save the callback's state into a checkpoint, before ``on_save`` where that is too late.

        Args:
            folder: the checkpoint.
            state: that of the Trainer.
        """
        own_state = self._hosted.state_dict()
        if own_state and state.is_world_process_zero:
            import checkpoint_io

            checkpoint_io.save(self._state_folder(folder), own_state)
        self._saved_into = os.path.basename(folder)

    def _restore(self, folder: str) -> None:
        import checkpoint_io

        path = self._state_folder(folder)
        if os.path.isdir(path):
            self._hosted.load_state_dict(checkpoint_io.load(path).state)
        elif self._hosted.state_dict():
            warn(f"{self._hosted.name} is not resumed: its state is missing, {path}")

    def _state_folder(self, checkpoint: str) -> str:
        name = re.sub(r"[^\w.=-]", "_", self._hosted.name)
        return os.path.join(checkpoint, _FOLDER, name)


class TransformersHost(ForeignHost):
    """The Trainer's arguments, state and control, as of its last event.

    Args:
        trainer: the Trainer, if the user passed it; values are logged through it.

    Attributes:
        is_logging: the Trainer is logging values of one of our callbacks.
        epoch: index of the epoch; the Trainer's own number is already the next at an epoch's end.
        resumed_from: the checkpoint that training resumes from.
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
        self._objects: dict[str, Any] = {}  # model, optimizer, loaders, ... by the event's keywords
        self._metrics: dict[str, Any] = {}

    def bind(self, args: Any, state: Any, control: Any) -> None:
        """Take over the arguments of an event."""
        self._args, self._state, self._control = args, state, control

    def bind_objects(self, objects: Mapping[str, Any]) -> None:
        """Take over the objects of an event; those that it omits are kept from earlier ones."""
        self._objects.update({name: value for name, value in objects.items() if value is not None})

    def get(self, name: str) -> Any:
        """Return an attribute from the Trainer's arguments and state."""
        return _ATTRIBUTES[name](self)

    @property
    def bare_models(self) -> list[torch.nn.Module]:
        """The model."""
        return [self._objects["model"]]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The Trainer's optimizer, without Accelerate's wrapper."""
        optimizer = self._objects.get("optimizer")
        return [] if optimizer is None else [getattr(optimizer, "optimizer", optimizer)]

    @property
    def skipped(self) -> bool:
        """The fp16 scaler has skipped this step."""
        return bool(getattr(self._objects.get("optimizer"), "step_was_skipped", False))

    @property
    def schedulers(self) -> list[Any]:
        """The Trainer's scheduler, without Accelerate's wrapper."""
        scheduler = self._objects.get("lr_scheduler")
        return [] if scheduler is None else [getattr(scheduler, "scheduler", scheduler)]

    def settings(self) -> dict[str, Any]:
        """Return the Trainer's arguments, without secrets."""
        return dict(self._args.to_sanitized_dict())

    def metrics(self) -> dict[str, Any]:
        """Return the logged values."""
        return self._metrics

    @property
    def device(self) -> torch.device:
        """The device of the Trainer's arguments."""
        return torch.device(self._args.device)

    def write(self, values: dict[str, Any], step: int) -> None:
        """Log through the Trainer; without it, append to the log history of its state."""
        numbers = {n: float(v) if not isinstance(v, str) else v for n, v in values.items()}
        if self._trainer is None:
            epoch = self._state.epoch
            self._state.log_history.append({**numbers, "epoch": epoch, "step": step})
            return
        state, control = self._state, self._control
        # trainer.log uses the step of the state, and its on_log event resets control.should_log.
        should_log, counted = control.should_log, state.global_step
        self.is_logging, state.global_step = True, step
        try:
            self._trainer.log(numbers)
        finally:
            self.is_logging, state.global_step = False, counted
            control.should_log = should_log

    def stop(self, reason: str) -> None:
        """Set ``control.should_training_stop``."""
        self._control.should_training_stop = True

    def save_now(self, reason: str) -> None:
        """Set ``control.should_save``, for after this step."""
        self._control.should_save = True

    def save_last(self) -> None:
        """Set it, also where an evaluation that follows would decide whether to save."""
        strategy = self._args.save_strategy
        if strategy == "best":
            self._args.save_strategy = type(strategy)("steps")
        self.save_now("preempt")

    def accumulate(self, batches: int) -> None:
        """Set the argument; the Trainer reads it again at the next epoch."""
        self._args.gradient_accumulation_steps = batches

    # --- position -----------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """Set the index of an epoch that begins or resumes; return its number of batches done."""
        done = float(self._state.epoch or 0.0)
        self.epoch = int(done + 1e-9)
        batches = self._batches("train_dataloader")
        return 0 if math.isinf(batches) else round((done - self.epoch) * batches)

    @property
    def is_last_batch(self) -> bool:
        """After a step: it was the last of its epoch."""
        # state.epoch is a fraction of batches, so compare with a tolerance.
        return float(self._state.epoch or 0.0) >= self.epoch + 1 - 1e-9

    def _batches(self, loader: str) -> int | float:
        try:
            return len(self._objects[loader])
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
    "train_dataloader": lambda host: host._objects.get("train_dataloader"),
    "is_last_batch": lambda host: host.is_last_batch,
    "resumed_from": lambda host: host.resumed_from,
    "precision": lambda host: host._precision(),
    "accumulate_grad_batches": lambda host: host._args.gradient_accumulation_steps,
    "default_root_dir": lambda host: host._args.output_dir,
    "log_dir": lambda host: host._args.output_dir,
    "local_rank": lambda host: host._args.local_rank,
}
