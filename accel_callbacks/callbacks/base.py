"""Callback: the hooks, their names and arguments as in Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from accel_callbacks.loop.run import TrainingRun

__all__ = ["HOOKS", "Callback"]

#: Every hook, in the order in which a run meets them first; those in ``EXIT_HOOKS`` are called
#: in reverse order of the callbacks.
HOOKS = (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_log",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_test_epoch_end",
    "on_test_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_checkpoint_saved",
    "on_load_checkpoint",
    "on_preempt",
    "on_exception",
    "on_train_end",
    "on_fit_end",
    "teardown",
)
EXIT_HOOKS = ("on_train_end", "on_fit_end", "teardown")


class Callback:
    """Base class of callbacks: override the hooks you need, the others cost nothing.

    Every hook gets the :class:`TrainingRun` in the place of Lightning's trainer, and the first
    prepared model (unwrapped; ``None`` if there is none) in the place of its module.

    Attributes:
        can_vote: set it to True if the callback may call ``run.stop``, ``run.save_now`` or
            ``run.preempt`` in the middle of an epoch; with several processes, they are then agreed
            on at each optimizer step.
        runs_last: True for a callback that saves: it is called after the others, so that what it
            saves holds what they did in the same hook.
        collective: True if its hooks meet the other processes; it must be there on all of them.
        saves_alike: True if what its ``on_save_checkpoint`` puts in the place of weights is the
            same on all processes, so that each may go on writing a part of them; else the main one
            does.
        on_error: what an error of a hook does: ``"raise"`` (the default) ends the run, ``"warn"``
            is a warning, ``"disable"`` a warning after which only its ``teardown`` is called.
        before: callbacks, their classes or state keys, that this one is called before; one or a
            tuple.
        after: those that it is called after.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator, Callback
        >>> class CountSteps(Callback):
        ...     steps = 0
        ...
        ...     def on_after_optimizer_step(self, run, model, optimizer):
        ...         self.steps += 1
        >>> counter = CountSteps()
        >>> accel = Accelerator(cpu=True, callbacks=[counter])
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accel.backward(model(torch.ones(1, 1)).sum())
        >>> optimizer.step()
        >>> counter.steps
        1
    """

    can_vote: bool = False
    runs_last: bool = False
    collective: bool = False
    saves_alike: bool = False
    on_error: str = "raise"
    before: Any = ()
    after: Any = ()

    @property
    def state_key(self) -> str:
        """The name under which this callback's state is saved; unique among the callbacks."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs: JSON-like values and tensors, no other objects."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, in place."""

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """A run begins; before a checkpoint is restored. ``stage`` is ``"fit"``."""

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """A run is over, well or not."""

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """After a checkpoint was restored, before anything is trained."""

    def on_fit_end(self, run: TrainingRun, model: Any) -> None:
        """After all training, without an exception."""

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Before the first training epoch of this process."""

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """After the last training epoch."""

    def on_train_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """An epoch begins; not called again when a run resumes inside of it."""

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """An epoch is over, with the validation in it where ``run.epochs`` counts."""

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """The loader delivers a training batch; it is on the device."""

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The loop's body is over; ``outputs`` is ``{"loss": last loss}``, undivided, or None."""

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """``accel.backward`` was called with this loss."""

    def on_after_backward(self, run: TrainingRun, model: Any) -> None:
        """Gradients of the micro-batch are there (scaled, with fp16)."""

    def on_before_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """A real step is about to happen; gradients are unscaled."""

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """A real step happened (not if it was skipped); ``run.global_step`` counts it."""

    def on_before_zero_grad(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Gradients are about to be cleared."""

    def on_log(self, run: TrainingRun, model: Any, metrics: Mapping[str, Any], step: int) -> None:
        """``accel.log`` was called; tensors are detached and still on their device."""

    def on_validation_start(self, run: TrainingRun, model: Any) -> None:
        """An evaluation begins."""

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """An evaluation is over."""

    def on_validation_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Right after ``on_validation_start``."""

    def on_validation_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Right before ``on_validation_end``."""

    def on_validation_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The loader delivers a batch inside an evaluation."""

    def on_validation_batch_end(
        self,
        run: TrainingRun,
        model: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """The evaluation loop's body is over; ``outputs`` is None."""

    def on_test_start(self, run: TrainingRun, model: Any) -> None:
        """An evaluation with ``stage="test"`` begins."""

    def on_test_end(self, run: TrainingRun, model: Any) -> None:
        """It is over."""

    def on_test_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Right after ``on_test_start``."""

    def on_test_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Right before ``on_test_end``."""

    def on_test_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The loader delivers a batch inside a test."""

    def on_test_batch_end(
        self,
        run: TrainingRun,
        model: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """The test loop's body is over; ``outputs`` is None."""

    def on_save_checkpoint(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written; add entries to the dict (rank 0's count)."""

    def on_checkpoint_saved(self, run: TrainingRun, model: Any, path: str) -> None:
        """The checkpoint at ``path`` is durable."""

    def on_load_checkpoint(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was read and verified; called before any state is restored."""

    def on_preempt(self, run: TrainingRun, model: Any, reason: str) -> None:
        """All processes have agreed to give way: save now, the run stops afterwards."""

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """The run ends with this exception; other processes may be gone, so no collectives."""
