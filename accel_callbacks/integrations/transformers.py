"""to_transformers: one of our callbacks inside of ``transformers.Trainer``."""

from __future__ import annotations

import importlib
import os
import re
import warnings
from typing import Any

from accel_callbacks.callbacks.adapters.transformers_host import TransformersHost
from accel_callbacks.integrations.foreign_trainer import Outward

__all__ = ["to_transformers"]

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
        outward.view.begin()
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
        outward.view.batch_idx = done - 1

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
        outward.fire("on_train_batch_end", None, None, outward.view.batch_idx)
        self._begin_batch(outward)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The last micro-batch; an evaluation may follow at once."""
        outward = self._at(args, state, control, given)
        outward.fire("on_train_batch_end", None, None, outward.view.batch_idx)
        outward.agree()
        if control.should_evaluate:  # the Trainer tells that it will, not when it begins
            self._begin_evaluation(outward)

    def _begin_batch(self, outward: Outward) -> None:
        outward.view.batch_idx += 1
        outward.fire("on_train_batch_start", None, outward.view.batch_idx)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Gradients are clipped already."""
        outward = self._at(args, state, control, given)
        for optimizer in outward.view.optimizers:
            outward.fire("on_before_optimizer_step", optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The Trainer counts this step, and clears the gradients, after this."""
        outward = self._at(args, state, control, given)
        host: Any = outward.host
        for optimizer in outward.view.optimizers:
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
