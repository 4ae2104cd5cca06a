"""SpikeGuard: go back where the loss or the gradients jump, past the samples that caused it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_callbacks.callbacks.base import require_at_least
from accel_callbacks.callbacks.host_state import Undo, capture
from accel_callbacks.callbacks.non_finite import (
    GradientNorms,
    NonFinite,
    Rollback,
    StepCheck,
    device_of,
    keep_options,
)

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["SpikeGuard"]

_SERIES = ("loss", "gradient norm")
# Of a normal distribution: its standard deviation over its median absolute deviation.
_DEVIATIONS = 1.4826
# Of the median: a loss that hardly moves would make a spike of its rounding.
_LEAST_SPREAD = 1e-3


class _Snapshot(NamedTuple):
    """The weights after a step, in host memory."""

    step: int
    undo: list[Undo]


class SpikeGuard(NonFinite):
    """Go back to weights of before where the loss or the norm of the gradients jumps.

    A step is a spike if its loss, or the norm of its gradients, is not finite, or lies above the
    median of the last steps by more than a number of robust standard deviations (1.4826 times the
    median absolute deviation). It is not taken. Models, optimizers and averages go back to the
    newest copy in host memory, or else to the newest checkpoint; data, random numbers, the step
    count and the schedule go on as if nothing had happened. So the samples from the copy to the
    spike are left out, on all ranks alike, and every other sample is seen once.

    All ranks decide by the same numbers: the mean of their losses and the norm of all gradients,
    which cost one small collective a step. On the CPU they decide before the step is taken. On
    other devices the numbers are read one step later, and nothing waits for them.

    Args:
        loss_threshold: robust standard deviations above the median that are a spike of the loss;
            10 by default, no check but for finite losses if None.
        gradient_threshold: those of the norm of the gradients; 20 by default, likewise.
        window: good steps that the median is taken over; 100 by default.
        warmup: good steps before the first judgment, except on what is not finite; 30 by default.
        snapshot_every_n_steps: copy the weights to host memory so often; 20 by default. If None go
            back to checkpoints alone.
        max_rollbacks: raise after so many without ``window`` good steps between them, with the
            whole story; 3 by default.

    Attributes:
        rollbacks: number of rollbacks.
        story: a sentence on each of them.

    Raises:
        ValueError: a number that is too small. When the run starts: an engine keeps the weights or
            the optimizers to itself, as DeepSpeed does; or without snapshots there is no callback
            that saves.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import SpikeGuard
        >>> guard = SpikeGuard(warmup=5, snapshot_every_n_steps=2)
        >>> accel = Accelerator(cpu=True, callbacks=[guard])
        >>> model = torch.nn.Linear(1, 1)
        >>> inputs = torch.ones(20, 1)
        >>> inputs[12] = 1e4  # a damaged sample
        >>> loader = torch.utils.data.DataLoader(inputs)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> model, optimizer, loader = accel.prepare(model, optimizer, loader)
        >>> with accel.run("demo") as run:
        ...     for epoch in run.epochs(1):
        ...         for batch in loader:
        ...             accel.backward(model(batch).square().mean())
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> guard.rollbacks, run.global_step, bool(model.weight.abs() < 2)
        (1, 19, True)
    """

    _rollback_option = "(snapshot_every_n_steps=None)"
    _rollback_cause = "spike"

    def __init__(
        self,
        loss_threshold: float | None = 10.0,
        gradient_threshold: float | None = 20.0,
        window: int = 100,
        warmup: int = 30,
        snapshot_every_n_steps: int | None = 20,
        max_rollbacks: int = 3,
    ) -> None:
        require_at_least(
            1, loss_threshold=loss_threshold, gradient_threshold=gradient_threshold, window=window
        )
        require_at_least(2, warmup=warmup)
        require_at_least(1, snapshot_every_n_steps=snapshot_every_n_steps)
        if warmup > window:
            raise ValueError(f"warmup={warmup} must be at most window={window}.")
        self.loss_threshold = loss_threshold
        self.gradient_threshold = gradient_threshold
        self.window = window
        self.warmup = warmup
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.needs_checkpoints = snapshot_every_n_steps is None
        super().__init__(action="rollback", max_rollbacks=max_rollbacks)

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        super().reset_state()
        self.story: list[str] = []
        self._history: dict[int, list[deque[float]]] = {}  # by the optimizer's number
        # Two, because the newest may be of a step that is not judged yet.
        self._snapshots: deque[_Snapshot] = deque(maxlen=2)
        self._tries = 0  # rollbacks without a window of good steps between them
        self._good_steps = 0  # since the last of them

    def _discard_step(self) -> None:
        super()._discard_step()
        self._micro_batches = 0

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the state, unless ``load_state`` restored it; refuse what cannot be copied."""
        super().setup(run, model, stage)
        strategy = run.accelerator.strategy
        if self.snapshot_every_n_steps is not None and strategy.owns_step:
            raise ValueError(
                "SpikeGuard cannot copy the weights and optimizers of this engine: go back to "
                "checkpoints, by SpikeGuard(snapshot_every_n_steps=None) and a Checkpoint callback."
            )

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Copy the weights with which training starts."""
        self._take_snapshot(run)

    # --- measuring ----------------------------------------------------------------------------

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Add up the losses of a step, and count them."""
        self._micro_batches = 1 if self._loss_read else self._micro_batches + 1
        super().on_before_backward(run, model, loss)

    def _make_check(
        self, run: TrainingRun, optimizer: torch.optim.Optimizer, norms: GradientNorms | None
    ) -> _SpikeCheck:
        loss = None if self._loss is None else self._loss / max(self._micro_batches, 1)
        # Each optimizer has a history of its own: those of a GAN have other gradients.
        number = [id(own) for own in run.optimizers].index(id(optimizer))
        history = self._history.setdefault(number, self._new_history())
        return _SpikeCheck(
            run.next_step(optimizer),
            loss,
            norms,
            loss_scale=run.loss_scale(),
            overflow=self._overflow,
            collective=run.in_lockstep,
            judge=self._judge,
            history=history,
        )

    def _new_history(self) -> list[deque[float]]:
        return [deque(maxlen=self.window) for _ in _SERIES]

    def _judge(self, values: list[float], histories: list[deque[float]]) -> list[str]:
        """Return a clause for each value that is a spike."""
        thresholds = (self.loss_threshold, self.gradient_threshold)
        clauses = []
        for name, value, history, threshold in zip(
            _SERIES, values, histories, thresholds, strict=True
        ):
            if not math.isfinite(value):
                clauses.append(f"the {name} is {value}")
            elif threshold is not None and len(history) >= self.warmup:
                median = statistics.median(history)
                if value <= median:
                    continue
                deviation = statistics.median(abs(entry - median) for entry in history)
                spread = max(_DEVIATIONS * deviation, _LEAST_SPREAD * abs(median))
                if value > median + threshold * spread:
                    clauses.append(
                        f"the {name} is {value:.4g}, and was {median:.4g} "
                        f"± {spread:.2g} over {len(history)} steps"
                    )
        return clauses

    # --- acting -------------------------------------------------------------------------------

    def _note_good(self, check: Any) -> None:
        super()._note_good(check)
        check.remember()
        self._good_steps += 1
        if self._good_steps >= self.window:
            self._tries = 0

    def _count_try(self, text: str) -> None:
        if self._tries >= self.max_rollbacks:
            told = "".join(f"\n  {sentence}" for sentence in self.story)
            raise FloatingPointError(
                f"{text}, after {self._tries} rollbacks with fewer than {self.window} good steps "
                f"between them. Look at the samples, lower the learning rate, or raise the "
                f"thresholds of SpikeGuard.{told}"
            )
        self._tries += 1
        self._good_steps = 0

    def _go_back(self, run: TrainingRun, reason: str) -> Rollback:
        snapshot = next((s for s in reversed(self._snapshots) if s.step <= self._good_step), None)
        if snapshot is None:
            result = super()._go_back(run, reason)
        else:
            with keep_options(run.accelerator.training_state):
                for restore in snapshot.undo:
                    restore()
            result = Rollback(f"step {snapshot.step} in host memory", self._avoided)
        if result.path is not None:
            self.story.append(f"{reason}: went back to the weights of {result.path}")
            run.accelerator.log({"rollbacks": self.rollbacks + 1})
        return result

    # --- copies -------------------------------------------------------------------------------

    def _take_snapshot(self, run: TrainingRun, *, alone: bool = False) -> None:
        """Copy the weights of now; ``alone`` if those of before are not to be used any more."""
        if self.snapshot_every_n_steps is None:
            return
        if alone:
            self._snapshots.clear()
        if self._snapshots and self._snapshots[-1].step == run.global_step:
            return
        training = run.accelerator.training_state
        targets: list[Any] = [*(optimizer.optimizer for optimizer in training.optimizers)]
        targets += [training.precision, training.registered]
        targets += [
            entry.callback
            for entry in training.loop.dispatch.entries
            if getattr(entry.callback, "rolls_back", False)
        ]
        undo = [capture(model, gradients=False) for model in training.bare_models]
        undo += [capture(target) for target in targets]
        self._snapshots.append(_Snapshot(run.global_step, undo))

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Roll back if planned, and copy the weights every so many steps."""
        super().on_train_batch_end(run, model, outputs, batch, batch_idx)
        every = self.snapshot_every_n_steps
        if every is not None and run.global_step % every == 0 and not run.in_window:
            self._take_snapshot(run)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Drop the copies, and release the run."""
        super().teardown(run, model, stage)
        self._snapshots.clear()

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, the story and the values of the window."""
        state = super().state_dict()
        if self._run is not None and self._run.iterating:
            # A run that is resumed from here has this copy and none of before. This one must not
            # have more, or it would end elsewhere.
            self._take_snapshot(self._run, alone=True)
        return state | {
            "story": list(self.story),
            "tries": self._tries,
            "good_steps": self._good_steps,
            "history": {
                str(number): [list(series) for series in history]
                for number, history in self._history.items()
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place."""
        super().load_state_dict(state_dict)
        self.story = list(state_dict["story"])
        self._tries, self._good_steps = state_dict["tries"], state_dict["good_steps"]
        self._history = {
            int(number): [deque(series, maxlen=self.window) for series in history]
            for number, history in state_dict["history"].items()
        }


class _SpikeCheck(StepCheck):
    """The mean loss and the norm of the gradients of one step, of all ranks."""

    def __init__(
        self,
        step: int,
        loss: torch.Tensor | None,
        gradients: GradientNorms | None,
        *,
        loss_scale: torch.Tensor | None,
        overflow: torch.Tensor | None,
        collective: bool,
        judge: Callable[[list[float], list[deque[float]]], list[str]],
        history: list[deque[float]],
    ) -> None:
        self._judge, self._history = judge, history
        device = device_of(loss, gradients)
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        squares = torch.zeros((), device=device, dtype=dtype)
        for group in [] if gradients is None else gradients.norms:
            squares = squares + group.to(device, dtype).square().sum()
        if loss_scale is not None:
            squares = squares / loss_scale.to(device, dtype).square()
        is_overflow = squares.new_zeros(()) if overflow is None else overflow.to(device, dtype)
        value = squares.new_zeros(()) if loss is None else loss.to(dtype)
        # One that is not finite on any rank is not finite in the sum.
        numbers = torch.stack([value, squares, is_overflow])
        super().__init__(step, numbers, "sum", collective=collective)

    def values(self) -> list[float]:
        """Return the mean loss and the norm; of one that overflowed under fp16 that of before."""
        loss, squares, overflows = self._numbers.read().tolist()
        norms = self._history[1]
        before = norms[-1] if norms else 0.0
        return [loss / self._ranks, before if overflows else math.sqrt(squares)]

    def _spikes(self) -> list[str]:
        """Return a clause for each value that is a spike; waits for the device."""
        return self._judge(self.values(), self._history)

    def is_bad(self) -> bool:
        """Return whether one of them is a spike; waits for the device."""
        return bool(self._spikes())

    def describe(self, known: Mapping[int, str]) -> str:
        """Describe the spike."""
        return f"step {self.step}: {', and '.join(self._spikes())}"

    def remember(self) -> None:
        """Add the values to those that later ones are compared with."""
        for series, value in zip(self._history, self.values(), strict=True):
            series.append(value)
