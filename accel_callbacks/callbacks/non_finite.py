"""Losses and gradients that are not finite: stop, leave the step out, or go back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.callbacks.finite import (
    Finding,
    GradientLook,
    look_at,
    may_overflow,
    meets_others,
    names_of,
    parameters_of,
    step_of,
)
from accel_callbacks.callbacks.freeze import Freeze
from accel_callbacks.callbacks.resumable_state import ResumableState
from accel_callbacks.callbacks.rollback import roll_back, save_is_due
from accel_callbacks.callbacks.weight_averaging import Averaging
from accel_callbacks.errors import nearest

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["NonFinite"]

_CHECKS = ("loss", "gradients")
_ACTIONS = ("raise", "skip", "rollback", "warn")
_ADVICE = (
    'Look at the batch, lower the learning rate, or clip; NonFinite(action="skip") leaves such '
    'steps out, and action="rollback" goes back to the last checkpoint.'
)


class NonFinite(ResumableState):
    """Watches for losses and gradients that are infinite or not a number.

    All processes decide alike, also where only one has seen it. On the CPU that is before the step
    is taken. On other devices the result is read one step later, so that nothing waits for it;
    with ``"skip"`` the step has to wait.

    With fp16, gradients that are not finite while the loss scale is above 1 are no fault: the
    scaler leaves the step out and lowers the scale. From a scale of 1 on they count, and a loss
    always does.

    Args:
        check: what to look at, ``("loss", "gradients")`` or one of them.
        action: what to do: ``"raise"`` a ``FloatingPointError`` (the default); ``"skip"`` this
            optimizer step; ``"rollback"``: skip it, and go on from the weights of the newest
            checkpoint with the next batches, so that those that led there are left behind;
            or ``"warn"``.
        patience: with ``"skip"`` and ``"warn"``, raise after more bad steps in a row than this;
            10 by default, never if ``None``. A good step of another optimizer ends the row.
        every_n_steps: look at every so many optimizer steps, 1 by default.
        max_rollbacks: raise instead of one more; 3 by default.

    Attributes:
        bad_steps: how many there were.
        in_a_row: how many of them until now without a good one between.
        rollbacks: how often it went back.

    Raises:
        ValueError: an unknown check or action, or a number that is too small. When the run begins:
            ``"rollback"`` without a callback that saves.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import NonFinite
        >>> accel = Accelerator(cpu=True, callbacks=[NonFinite()])
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accel.backward(model(torch.full((1, 1), torch.nan)).sum())
        >>> optimizer.step()
        Traceback (most recent call last):
        FloatingPointError: step 1: the loss is nan, and the gradients of 'weight' are not \
finite. Look at the batch, lower the learning rate, or clip; NonFinite(action="skip") leaves such \
steps out, and action="rollback" goes back to the last checkpoint.
    """

    collective = True
    after = (Freeze,)  # which drops gradients that no step is taken with
    before = (Averaging,)  # which may lend the models to an evaluation

    def __init__(
        self,
        check: str | Sequence[str] = _CHECKS,
        action: str = "raise",
        patience: int | None = 10,
        every_n_steps: int = 1,
        max_rollbacks: int = 3,
    ) -> None:
        checks = (check,) if isinstance(check, str) else tuple(check)
        for one in checks or ("",):
            if one not in _CHECKS:
                raise ValueError(f"check={check!r}: use 'loss', 'gradients' or both.")
        if action not in _ACTIONS:
            hint = nearest(str(action), _ACTIONS)
            raise ValueError(f"action={action!r} is unknown; use one of {_ACTIONS}.{hint}")
        least = {"patience": 0, "every_n_steps": 1, "max_rollbacks": 1}
        given = {"patience": patience, "every_n_steps": every_n_steps}
        for name, value in {**given, "max_rollbacks": max_rollbacks}.items():
            if value is not None and value < least[name]:
                raise ValueError(f"{name}={value} must be at least {least[name]}.")
        self.check = checks
        self.action = action
        self.patience = patience
        self.every_n_steps = every_n_steps
        self.max_rollbacks = max_rollbacks
        self._run: TrainingRun | None = None
        self.reset_state()

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        self.bad_steps = self.in_a_row = self.rollbacks = 0
        self._good_step = 0  # weights were finite up to here
        self._avoided: list[str] = []  # checkpoints whose weights may not be
        self._drop()

    def _unsee(self) -> None:
        """Forget what was seen of the step that is on its way."""
        self._loss: torch.Tensor | None = None
        self._loss_read = False  # by an optimizer; others of this step read it too
        self._looks: dict[int, GradientLook] = {}
        self._overflow: torch.Tensor | None = None

    def _drop(self) -> None:
        """Forget what was seen, and what was to follow from it."""
        self._unsee()
        self._waiting: Finding | None = None
        self._go_back: str | None = None

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the state, unless ``load_state`` restored it; the step in progress is dropped."""
        if self.action == "rollback" and not run.checkpoint_callbacks:
            raise ValueError(
                'NonFinite(action="rollback") needs checkpoints to go back to: give the '
                "Accelerator a Checkpoint callback too."
            )
        super().setup(run, model, stage)
        self._drop()
        self._run = run

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """What a run begins with is trusted."""
        self._good_step = run.global_step

    # --- looking ------------------------------------------------------------------------------

    def _is_due(self, run: TrainingRun, *optimizers: torch.optim.Optimizer) -> bool:
        return any(
            step_of(run, optimizer) % self.every_n_steps == 0
            for optimizer in optimizers or run.optimizers
        )

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Add the losses of a step up: the sum is not finite where one of them is not."""
        if "loss" in self.check and self._is_due(run):
            value = loss.detach().float()
            value = value.sum() if value.dim() else value
            before = None if self._loss_read else self._loss
            self._loss = value if before is None else before + value
            self._loss_read = False

    def on_after_backward(self, run: TrainingRun, model: Any) -> None:
        """Look at the gradients before they are clipped, which would spoil them all."""
        # Another trainer's stand-in does not know: then it looks before the step.
        complete = getattr(run.accelerator, "sync_gradients", False)
        if complete and "gradients" in self.check and self._is_due(run):
            self._overflow = may_overflow(run)
            for optimizer in run.optimizers:
                self._looks[id(optimizer)] = look_at(parameters_of(optimizer))

    def on_before_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Judge this step, or the one before where this one's result is still on its way."""
        if self._go_back is not None:  # the gradients come from bad weights
            run.skip_step(self._go_back)
        if self._go_back is not None or not self._is_due(run, optimizer):
            self._unsee()
            return
        finding: Finding | None = self._find(run, optimizer)
        if finding is not None and finding.waits and self.action != "skip":
            finding, self._waiting = self._waiting, finding
        if finding is not None:
            self._judge(run, finding, before_step=True)

    def _find(self, run: TrainingRun, optimizer: torch.optim.Optimizer) -> Finding:
        look = self._looks.pop(id(optimizer), None)
        if look is None and "gradients" in self.check:
            look = look_at(parameters_of(optimizer))
        self._loss_read, step = True, step_of(run, optimizer)
        return Finding(step, self._loss, look, overflow=self._overflow, meets=meets_others(run))

    # --- judging ------------------------------------------------------------------------------

    def _judge(self, run: TrainingRun, finding: Finding, *, before_step: bool) -> None:
        if not finding.is_bad():
            self.in_a_row = 0
            self._good_step = finding.step
            return
        self.bad_steps += 1
        self.in_a_row += 1
        text = finding.tell(names_of(run))
        alone = collectives.world_size() > 1 and not meets_others(run)
        if self.action == "raise" or (alone and self.action != "warn"):
            raise FloatingPointError(f"{text}. {_ADVICE}")
        if self.action == "rollback":
            self._plan_rollback(run, text, before_step)
            return
        if self.patience is not None and self.in_a_row > self.patience:
            raise FloatingPointError(f"{text}. {self.in_a_row} steps in a row were bad. {_ADVICE}")
        if self.action == "skip":
            run.skip_step(text)
        elif run.is_global_zero:
            warnings.warn(text, stacklevel=2)

    def _plan_rollback(self, run: TrainingRun, text: str, before_step: bool) -> None:
        """Leave this step out; at the end of it, go back."""
        if self.rollbacks >= self.max_rollbacks:
            raise FloatingPointError(f"{text}, after {self.rollbacks} rollbacks. {_ADVICE}")
        self._drop()
        self._go_back = text
        if before_step:
            run.skip_step(text)

    def _settle(self, run: TrainingRun) -> None:
        """Read what is still on its way."""
        finding, self._waiting = self._waiting, None
        if finding is not None:
            self._judge(run, finding, before_step=False)

    def _return(self, run: TrainingRun) -> None:
        """Collective, between two steps: go back, if that was decided."""
        if self._go_back is None or run.accelerator.window.is_open:
            return
        text, accel = self._go_back, run.accelerator
        self._drop()
        led = roll_back(accel, newest_step=self._good_step, avoid=self._avoided)
        if led.path is None:
            raise FloatingPointError(
                f"{text}, and there is no checkpoint from before to go back to: save earlier, with "
                "Checkpoint(every_n_steps=...)."
            )
        self.rollbacks += 1
        self._avoided = led.avoided
        self._good_step = run.global_step
        count = f"rollback {self.rollbacks} of at most {self.max_rollbacks}"
        accel._notice(f"{text}: went back to the weights of {led.path} ({count})")

    # --- where a step is over -----------------------------------------------------------------

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go back, if that was decided; know about this step before it is saved."""
        if self._waiting is not None and save_is_due(run):
            self._settle(run)
        self._return(run)

    def on_before_zero_grad(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Where no prepared loader tells that a step is over; what is given up does not count."""
        self._unsee()
        if self._go_back is not None and not run.accelerator.loop.active:
            self._return(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Know about the last step, and go back if that is what follows."""
        self._settle(run)
        self._return(run)

    on_validation_start = on_test_start = on_train_end = on_train_epoch_end

    def on_preempt(self, run: TrainingRun, model: Any, reason: str) -> None:
        """Likewise."""
        self.on_train_epoch_end(run, model)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Let go of what was seen."""
        self._drop()
        self._run = None

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was counted. A save waits for the last step: it must not keep what is bad."""
        if self._run is not None:
            self._settle(self._run)
        return {
            "bad_steps": self.bad_steps,
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
            "avoided": list(self._avoided),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place."""
        self.bad_steps = state_dict["bad_steps"]
        self.in_a_row = state_dict["in_a_row"]
        self.rollbacks = state_dict["rollbacks"]
        self._avoided = list(state_dict["avoided"])
