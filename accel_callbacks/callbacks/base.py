"""Callback: the hooks, their names and arguments as in Lightning."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_callbacks._lazy import foreign_name
from accel_callbacks.errors import unknown_option

if TYPE_CHECKING:
    import torch

    from accel_callbacks.loop.run import TrainingRun

__all__ = ["HOOKS", "Callback", "ResumableState", "require_at_least"]

#: All hooks, in the order in which a run first fires them. Those in ``EXIT_HOOKS`` call the
#: callbacks in reverse order.
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
_NO_FILENAME = (
    "Checkpoints are named step-<global step>, so that a resume finds the newest: leave it out. "
    "dirpath names their folder, monitor puts a metric into them (accel ckpt ls shows it), and "
    "accel.save_state(path) saves under any name."
)


class Callback:
    """Base class of callbacks: override the hooks you need, the others cost nothing.

    Every hook is passed the :class:`TrainingRun` in place of Lightning's trainer, and the first
    prepared model that has an optimizer (unwrapped; the first one if none has, ``None`` without a
    model) in place of its module.

    Attributes:
        can_vote: set to True if the callback may call ``run.stop``, ``run.save_now`` or
            ``run.preempt`` in the middle of an epoch; with several processes, the ranks then agree
            on these at each optimizer step, and act on them at the end of the next one.
        votes_at_once: True if the ranks are to act at the end of the very step, for which each of
            them waits for the slowest one at each step.
        runs_last: True for a callback that saves: it is called after the others, so that the
            checkpoint contains what they did in the same hook.
        collective: True if its hooks call collectives; it must be registered on all ranks.
        saves_alike: True if its ``on_save_checkpoint`` replaces weights by the same values on all
            ranks, so that each rank can still write its part of them; otherwise the main process
            writes them all.
        on_error: what an error in a hook does: ``"raise"`` (the default) ends the run, ``"warn"``
            warns, ``"disable"`` warns, and only ``teardown`` is called from then on.
        before: callbacks, their classes or state keys, that this one is called before; one or a
            tuple.
        after: those that it is called after.
        settable: what ``accel ctl RUN set NAME=VALUE`` may change, by its name: the attribute that
            holds it; a whole number stays at least 1. Needs a :class:`Control` callback.
        name_option: the option of the constructor that gives instances of the class different
            ``state_key``; messages about several of them name it.

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
    votes_at_once: bool = False
    runs_last: bool = False
    collective: bool = False
    saves_alike: bool = False
    on_error: str = "raise"
    before: Any = ()
    after: Any = ()
    settable: Mapping[str, str] = {}
    name_option: str = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = _check_options(cls.__init__)  # type: ignore[method-assign]

    @property
    def state_key(self) -> str:
        """The name under which this callback's state is saved; further ones get a number."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs: JSON-like values and tensors, no other objects."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place the state that :meth:`state_dict` returned."""

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Called when a run starts, before a checkpoint is restored. ``stage`` is ``"fit"``."""

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Called when a run ends, with or without an error."""

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Called after a checkpoint was restored, before any training."""

    def on_fit_end(self, run: TrainingRun, model: Any) -> None:
        """Called after all training, if no exception ended it."""

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Called before the first training epoch of this process."""

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Called after the last training epoch."""

    def on_train_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Called when an epoch starts; not again when a run resumes inside it."""

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Called when an epoch ends, after its validation in a loop over ``run.epochs``."""

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called when the loader yields a training batch, which is on the device."""

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after the loop body; ``outputs`` is None or ``{"loss": last loss}``, undivided."""

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Called when ``accel.backward`` is called with this loss."""

    def on_after_backward(self, run: TrainingRun, model: Any) -> None:
        """Called when the gradients of the micro-batch are computed (scaled, with fp16)."""

    def on_before_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Called before an actual optimizer step; gradients are unscaled."""

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Called after a step that was not skipped; ``run.global_step`` counts it."""

    def on_before_zero_grad(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Called before gradients are cleared."""

    def on_log(self, run: TrainingRun, model: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Called when ``accel.log`` is called; tensors are detached and still on their device."""

    def on_validation_start(self, run: TrainingRun, model: Any) -> None:
        """Called when an evaluation starts."""

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """Called when an evaluation ends."""

    def on_validation_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Called right after ``on_validation_start``."""

    def on_validation_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Called right before ``on_validation_end``."""

    def on_validation_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called when a loader yields a batch inside an evaluation."""

    def on_validation_batch_end(
        self,
        run: TrainingRun,
        model: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after the body of the evaluation loop; ``outputs`` is None."""

    def on_test_start(self, run: TrainingRun, model: Any) -> None:
        """Called when an evaluation with ``stage="test"`` starts."""

    def on_test_end(self, run: TrainingRun, model: Any) -> None:
        """Called when an evaluation with ``stage="test"`` ends."""

    def on_test_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Called right after ``on_test_start``."""

    def on_test_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Called right before ``on_test_end``."""

    def on_test_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called when a loader yields a batch inside a test."""

    def on_test_batch_end(
        self,
        run: TrainingRun,
        model: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after the body of the test loop; ``outputs`` is None."""

    def on_save_checkpoint(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; add entries to the dict (rank 0's are saved)."""

    def on_checkpoint_saved(self, run: TrainingRun, model: Any, path: str) -> None:
        """Called when the checkpoint at ``path`` is durable."""

    def on_load_checkpoint(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """Called when a checkpoint was read and verified, before any state is restored."""

    def on_preempt(self, run: TrainingRun, model: Any, reason: str) -> None:
        """Called once all ranks agreed to stop for a preemption: save now, the run stops next."""

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Called when this exception ends the run; call no collectives, other ranks may be gone."""


class ResumableState(Callback):
    """Base class of callbacks whose state belongs to one run and survives a resume of it.

    ``setup`` resets the state where nothing was loaded and nothing trained. An evaluation after the
    end of a run fires ``setup`` too; the state of that run is kept then.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks.base import ResumableState
        >>> class CountEpochs(ResumableState):
        ...     def reset_state(self):
        ...         self.epochs = 0
        ...
        ...     def on_train_epoch_end(self, run, model):
        ...         self.epochs += 1
        >>> counter = CountEpochs()
        >>> accel = Accelerator(cpu=True, callbacks=[counter])
        >>> for _ in range(2):
        ...     with accel.run("demo") as run:
        ...         for epoch in run.epochs(3):
        ...             pass
        >>> counter.epochs
        3
    """

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        raise NotImplementedError

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the state, unless ``load_state`` restored it."""
        if run.starts_fresh:
            self.reset_state()


def require_at_least(least: int, **numbers: float | None) -> None:
    """Raise ValueError for an option that is below the least number that makes sense."""
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ValueError(f"{name}={number} must be at least {least}.")


def _check_options(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor: an option that it lacks is answered with the one that was meant."""
    parameters = inspect.signature(init).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return init
    known = list(parameters)[1:]

    @functools.wraps(init)
    def checked(self: Callback, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                instead = _instead(name, known)
                raise TypeError(unknown_option(type(self).__name__, name, known, instead))
        init(self, *args, **options)

    return checked


def _instead(name: str, known: Sequence[str]) -> str:
    """Return what to pass in place of an option of Lightning; empty if that is unknown."""
    if name == "filename" and "dirpath" in known:
        return _NO_FILENAME
    ours = foreign_name("CALLBACK_OPTIONS", name)
    return f"Did you mean {ours!r}?" if ours in known else ""
