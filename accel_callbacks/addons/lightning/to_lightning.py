"""to_lightning: one of our callbacks as a callback of pl.Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from accel_callbacks.addons.hosts.foreign_trainer import HostedCallback
from accel_callbacks.addons.hosts.host import FROM_TRAINER, ForeignHost
from accel_callbacks.addons.lightning.packages import import_lightning

__all__ = ["LightningHost", "NewMetrics", "to_lightning"]

#: Hooks of Lightning that fire ours of the same name.
_SAME_HOOKS = (
    "on_fit_start",
    "on_fit_end",
    "on_train_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)
#: Our hooks for which the Trainer has none.
_NEVER = ("on_checkpoint_saved", "on_preempt")


def to_lightning(callback: Any, *, package: str | None = None) -> Any:
    """Wrap one of our callbacks as a ``lightning.pytorch.Callback``, for ``Trainer(callbacks=)``.

    Its hooks get a run over the Trainer: the public attributes of ``TrainingRun``, ``run.stop`` and
    ``run.accelerator.log``, which logs to the Trainer's loggers. A name that only ``accel.run`` has
    raises an error that names it. The callback's state is saved in Lightning's checkpoints.
    ``on_after_optimizer_step`` and ``on_log`` fire too: after each real step, and when the
    LightningModule has logged new metrics.

    Args:
        callback: an object with our hooks, or what ``configured`` returned.
        package: ``"lightning"`` or ``"pytorch_lightning"``; if ``None``, the first of the two that
            is installed.

    Raises:
        TypeError: it is not a callback, or one that saves checkpoints of this library.
        ImportError: Lightning is not installed.

    Example:
        >>> from accel_callbacks.callbacks import Checkpoint
        >>> from accel_callbacks.callbacks.adapters import to_lightning
        >>> to_lightning(Checkpoint("runs"))
        Traceback (most recent call last):
        TypeError: Checkpoint cannot run in pl.Trainer: it saves and restores checkpoints of this
        library, which hold what the Accelerator prepared.
    """
    hosted = HostedCallback(callback, LightningHost(), never=_NEVER)
    base = import_lightning(package).get("callbacks.callback", "Callback")
    return type("FromAccelCallbacks", (_Hooks, base), {})(hosted)


class _Hooks:
    """Lightning's hooks, which fire ours; mixed into its Callback."""

    def __init__(self, hosted: HostedCallback) -> None:
        self.accel_callback = hosted.callback
        self._hosted = hosted
        self._new_metrics = NewMetrics()
        hosted.on_own_log = lambda values: self._new_metrics.exclude(values)
        self._step_hooks: list[Any] = []
        self._set_up = False

    def __repr__(self) -> str:
        return f"to_lightning({type(self.accel_callback).__name__})"

    def _bind(self, trainer: Any) -> HostedCallback:
        """Return the callback over this Trainer."""
        self._hosted.host.trainer = trainer  # type: ignore[attr-defined]
        return self._hosted

    # --- state --------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The key of our callback."""
        return self._hosted.name

    def state_dict(self) -> dict[str, Any]:
        """Return the state of our callback."""
        return self._hosted.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of our callback."""
        self._hosted.load_state_dict(state_dict)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Fire ours with the checkpoint under our keys, and take over its changes."""
        ours = _as_ours(checkpoint)
        known = set(ours)
        self._bind(trainer).fire("on_save_checkpoint", ours)
        checkpoint["state_dict"] = ours["models"]["0"]
        checkpoint.update({name: value for name, value in ours.items() if name not in known})

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Fire ours with the checkpoint under our keys beside Lightning's."""
        self._bind(trainer).fire("on_load_checkpoint", {**checkpoint, **_as_ours(checkpoint)})

    # --- start and end ------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Fire ours, for ``fit`` only."""
        if stage == "fit":
            hosted = self._bind(trainer)
            hosted.run.begin()
            self._new_metrics = NewMetrics()
            self._set_up = True
            hosted.fire("setup", stage)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Fire ours, if ``setup`` was fired."""
        if self._set_up and stage == "fit":
            self._end(trainer)

    def _end(self, trainer: Any) -> None:
        self._set_up = False
        for handle in self._step_hooks:
            handle.remove()
        self._step_hooks.clear()
        self._bind(trainer).fire("teardown", "fit")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Fire ours and ``teardown``, which Lightning does not call after an error."""
        self._bind(trainer).fire("on_exception", exception)
        if self._set_up:
            self._end(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Register hooks on the optimizers, which exist now, and fire ours."""
        hosted = self._bind(trainer)
        if hosted.has("on_after_optimizer_step"):
            self._step_hooks = [
                optimizer.register_step_post_hook(partial(self._after_step, trainer))
                for optimizer in trainer.optimizers
            ]
        hosted.fire("on_train_start")

    def _after_step(self, trainer: Any, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._bind(trainer).stepped(trainer.global_step + 1, optimizer)

    # --- training -----------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Fire ours."""
        self._bind(trainer).begin_epoch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Fire ``on_log`` for new metrics, then ours."""
        hosted = self._bind(trainer)
        self._fire_on_log(hosted)
        hosted.end_epoch()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Fire ours."""
        hosted = self._bind(trainer)
        hosted.run.epoch_open, hosted.run.batch_idx = True, batch_idx
        hosted.fire("on_train_batch_start", batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Fire ``on_log`` for new metrics, then ours with the undivided loss."""
        hosted = self._bind(trainer)
        self._fire_on_log(hosted)
        parts = trainer.accumulate_grad_batches
        if isinstance(outputs, Mapping) and "loss" in outputs and parts > 1:
            outputs = {**outputs, "loss": outputs["loss"] * parts}
        hosted.fire("on_train_batch_end", outputs, batch, batch_idx)
        hosted.agree()

    def _fire_on_log(self, hosted: HostedCallback) -> None:
        """Fire ``on_log`` with the metrics that the LightningModule has logged since the last."""
        if hosted.has("on_log"):
            new = self._new_metrics.among(dict(hosted.run.callback_metrics))
            if new:
                hosted.fire("on_log", new, hosted.run.global_step)

    # --- evaluation ---------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Fire ours, except in the sanity check before training."""
        if not trainer.sanity_checking:
            self._bind(trainer).begin_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Fire ours, then ``on_log`` for new metrics, as in a plain loop."""
        if not trainer.sanity_checking:
            hosted = self._bind(trainer)
            hosted.end_evaluation()
            self._fire_on_log(hosted)
            hosted.agree()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Fire ours."""
        self._bind(trainer).begin_evaluation("test")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Fire ours."""
        hosted = self._bind(trainer)
        hosted.end_evaluation("test")
        self._fire_on_log(hosted)


def _hook_of(hook: str) -> Callable[..., None]:
    """Return a hook that fires ours, except in the sanity check before training."""

    def fire(callback: _Hooks, trainer: Any, pl_module: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            callback._bind(trainer).fire(hook, *args)

    return fire


for _hook in _SAME_HOOKS:
    setattr(_Hooks, _hook, _hook_of(_hook))


def _as_ours(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return Lightning's checkpoint under the keys of our training state."""
    position = {"global_step": checkpoint["global_step"], "current_epoch": checkpoint["epoch"]}
    return {
        "models": {"0": checkpoint["state_dict"]},
        "callbacks": checkpoint.get("callbacks", {}),
        "run": position,
    }


class LightningHost(ForeignHost):
    """The Trainer that called the adapter last."""

    title = "pl.Trainer"

    def __init__(self) -> None:
        self.trainer: Any = None

    def get(self, name: str) -> Any:
        """Return an attribute from the Trainer's public ones."""
        if name == "resumed_from":
            return self.trainer.ckpt_path
        if name == "max_epochs":  # -1 is no limit
            return None if self.trainer.max_epochs == -1 else self.trainer.max_epochs
        if name not in (*FROM_TRAINER, "accumulate_grad_batches", "global_step"):
            raise KeyError(name)
        return getattr(self.trainer, name)

    @property
    def bare_models(self) -> list[torch.nn.Module]:
        """The LightningModule."""
        return [self.trainer.lightning_module]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of ``configure_optimizers``."""
        return list(self.trainer.optimizers)

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers of ``configure_optimizers``."""
        return [config.scheduler for config in self.trainer.lr_scheduler_configs]

    def metrics(self) -> dict[str, Any]:
        """Return ``trainer.callback_metrics``."""
        metrics: dict[str, Any] = self.trainer.callback_metrics
        return metrics

    @property
    def device(self) -> torch.device:
        """The strategy's root device."""
        return torch.device(self.trainer.strategy.root_device)

    def write(self, values: dict[str, Any], step: int) -> None:
        """Log numbers to all of the Trainer's loggers; this waits for the device."""
        numbers = {n: float(value) for n, value in values.items() if not isinstance(value, str)}
        for logger in self.trainer.loggers:
            logger.log_metrics(numbers, step=step)

    def stop(self, reason: str) -> None:
        """Set ``trainer.should_stop``, which the Trainer does not share with other ranks."""
        self.trainer.should_stop = True

    def accumulate(self, batches: int) -> None:
        """Set ``trainer.accumulate_grad_batches``."""
        self.trainer.accumulate_grad_batches = batches


class NewMetrics:
    """Finds metrics that were logged since the last call; Lightning has no hook for logging.

    A value that is logged again is another tensor with its own memory.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def among(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics that are new since the last call."""
        new = {n: value for n, value in metrics.items() if not _is_same(value, self._seen.get(n))}
        self._seen = dict(metrics)
        return new

    def exclude(self, values: dict[str, Any]) -> None:
        """Mark values as seen, because ``on_log`` has fired for them."""
        self._seen.update(values)


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return now.data_ptr() == before.data_ptr()
    return now is before
