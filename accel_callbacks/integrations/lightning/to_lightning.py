"""Our callback in pl.Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from accel_callbacks.integrations.foreign_trainer import Outward
from accel_callbacks.integrations.host import ForeignHost
from accel_callbacks.integrations.lightning.packages import LightningPackage, import_lightning

__all__ = ["FreshMetrics", "LightningHost", "to_lightning"]

#: Public attributes of the Trainer that mean the same in ``TrainingRun``.
_SAME = frozenset(
    (
        "accumulate_grad_batches",
        "callbacks",
        "checkpoint_callback",
        "checkpoint_callbacks",
        "ckpt_path",
        "current_epoch",
        "default_root_dir",
        "early_stopping_callback",
        "early_stopping_callbacks",
        "estimated_stepping_batches",
        "global_step",
        "is_last_batch",
        "local_rank",
        "log_dir",
        "max_steps",
        "node_rank",
        "num_devices",
        "num_nodes",
        "num_test_batches",
        "num_training_batches",
        "num_val_batches",
        "precision",
        "predicting",
        "test_dataloaders",
        "testing",
        "train_dataloader",
        "training",
        "val_dataloaders",
        "validating",
    )
)
#: Hooks of ours that the Trainer has no place for.
_NEVER = ("on_checkpoint_saved", "on_preempt")


class LightningHost(ForeignHost):
    """The Trainer by which the adapter was called last.

    Example:
        >>> from accel_callbacks.integrations.lightning.to_lightning import LightningHost
        >>> LightningHost().title
        'pl.Trainer'
    """

    title = "pl.Trainer"

    def __init__(self) -> None:
        self.trainer: Any = None

    def get(self, name: str) -> Any:
        """From the Trainer's public attributes."""
        if name in _SAME:
            return getattr(self.trainer, name)
        if name == "resumed_from":
            return self.trainer.ckpt_path
        if name == "max_epochs":  # -1 is no limit
            return None if self.trainer.max_epochs == -1 else self.trainer.max_epochs
        raise KeyError(name)

    @property
    def bare_models(self) -> list[torch.nn.Module]:
        """The LightningModule."""
        return [self.trainer.lightning_module]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of ``configure_optimizers``."""
        return list(self.trainer.optimizers)

    @property
    def schedulers(self) -> list[Any]:
        """Likewise."""
        return [config.scheduler for config in self.trainer.lr_scheduler_configs]

    def metrics(self) -> dict[str, Any]:
        """``trainer.callback_metrics``."""
        found: dict[str, Any] = self.trainer.callback_metrics
        return found

    @property
    def device(self) -> torch.device:
        """The strategy's."""
        return torch.device(self.trainer.strategy.root_device)

    def write(self, values: dict[str, Any], step: int) -> None:
        """To all of the Trainer's loggers; numbers are read from the device here."""
        numbers = {name: float(one) for name, one in values.items() if not isinstance(one, str)}
        for logger in self.trainer.loggers:
            logger.log_metrics(numbers, step=step)

    def stop(self, reason: str) -> None:
        """``trainer.should_stop``, of which the Trainer does not tell its other processes."""
        self.trainer.should_stop = True

    def accumulate(self, batches: int) -> None:
        """``trainer.accumulate_grad_batches``."""
        self.trainer.accumulate_grad_batches = batches


class FreshMetrics:
    """Which of the Trainer's metrics are new: Lightning does not tell when one is logged.

    A value that was logged again is another tensor, with memory of its own.

    Example:
        >>> import torch
        >>> from accel_callbacks.integrations.lightning.to_lightning import FreshMetrics
        >>> fresh, metrics = FreshMetrics(), {"loss": torch.tensor(1.0)}
        >>> list(fresh.among(metrics)), list(fresh.among(metrics))
        (['loss'], [])
    """

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def among(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Those that are new since the last look."""
        fresh = {
            name: value for name, value in metrics.items() if not _same(value, self._seen.get(name))
        }
        self._seen = dict(metrics)
        return fresh

    def note(self, values: dict[str, Any]) -> None:
        """These are no news."""
        self._seen.update(values)


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return now.data_ptr() == before.data_ptr()
    return now is before


def to_lightning(callback: Any, *, package: str | None = None) -> Any:
    """Make one of our callbacks a real ``lightning.pytorch.Callback``, for ``Trainer(callbacks=)``.

    The callback gets a view of the Trainer in the place of its run: the public attributes of
    ``TrainingRun``, ``run.stop`` and ``run.accelerator.log``, which goes to the Trainer's loggers.
    What only ``accel.run`` has is an error that names it. Its state is in Lightning's checkpoints.
    ``on_after_optimizer_step`` and ``on_log`` fire too: after each real step, and when metrics of
    the LightningModule are new.

    Args:
        callback: an object with our hooks, or what ``configured`` returned.
        package: ``"lightning"`` or ``"pytorch_lightning"``; the one that is installed, the first of
            the two, where ``None``.

    Raises:
        TypeError: it is no callback, or one that saves checkpoints of this library.
        ImportError: Lightning is not installed.

    Example:
        >>> from accel_callbacks.callbacks import Checkpoint
        >>> from accel_callbacks.callbacks.adapters import to_lightning
        >>> to_lightning(Checkpoint("runs"))
        Traceback (most recent call last):
        TypeError: Checkpoint cannot run in pl.Trainer: it saves and restores checkpoints of this
        library, which hold what the Accelerator prepared.
    """
    outward = Outward(callback, LightningHost(), never=_NEVER)
    if package is None:
        chosen = import_lightning()
    else:
        roots = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
        chosen = LightningPackage(roots.get(package, package))
    base = chosen.get("callbacks.callback", "Callback")
    return type("FromAccelCallbacks", (_Hooks, base), {})(outward)


class _Hooks:
    """Lightning's hooks; mixed into its Callback."""

    def __init__(self, outward: Outward) -> None:
        self.accel_callback = outward.callback
        self._outward = outward
        self._fresh = FreshMetrics()
        outward.noted = lambda values: self._fresh.note(values)
        self._step_hooks: list[Any] = []
        self._set_up = False

    def __repr__(self) -> str:
        return f"to_lightning({type(self.accel_callback).__name__})"

    def _at(self, trainer: Any) -> Outward:
        """The view shows this Trainer."""
        self._outward.host.trainer = trainer  # type: ignore[attr-defined]
        return self._outward

    # --- state --------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Our callback's own."""
        return self._outward.name

    def state_dict(self) -> dict[str, Any]:
        """Our callback's own."""
        return self._outward.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Our callback's own."""
        self._outward.load_state_dict(state_dict)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """With the model's weights under our names."""
        ours = _as_ours(checkpoint)
        known = set(ours)
        self._at(trainer).fire("on_save_checkpoint", ours)
        checkpoint["state_dict"] = ours["models"]["0"]
        checkpoint.update({name: value for name, value in ours.items() if name not in known})

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Likewise."""
        self._at(trainer).fire("on_load_checkpoint", {**checkpoint, **_as_ours(checkpoint)})

    # --- the life of a run --------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Of ``fit`` only, as ours is."""
        if stage == "fit":
            outward = self._at(trainer)
            outward.run.begin()
            self._fresh = FreshMetrics()
            self._set_up = True
            outward.fire("setup", stage)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The run is over."""
        if self._set_up and stage == "fit":
            self._end(trainer)

    def _end(self, trainer: Any) -> None:
        self._set_up = False
        for handle in self._step_hooks:
            handle.remove()
        self._step_hooks.clear()
        self._at(trainer).fire("teardown", "fit")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ours are torn down after an error too."""
        self._at(trainer).fire("on_exception", exception)
        if self._set_up:
            self._end(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Training is about to begin."""
        self._at(trainer).fire("on_fit_start")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """All is trained."""
        self._at(trainer).fire("on_fit_end")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers are there now, and tell of their steps."""
        outward = self._at(trainer)
        if outward.has("on_after_optimizer_step"):
            self._step_hooks = [
                optimizer.register_step_post_hook(partial(self._stepped, trainer))
                for optimizer in trainer.optimizers
            ]
        outward.fire("on_train_start")

    def _stepped(self, trainer: Any, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._at(trainer).stepped(trainer.global_step + 1, optimizer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """After the last epoch."""
        self._at(trainer).fire("on_train_end")

    # --- training -----------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """An epoch begins."""
        self._at(trainer).begin_epoch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Its metrics first."""
        outward = self._at(trainer)
        self._tell_log(outward)
        outward.end_epoch()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is there."""
        outward = self._at(trainer)
        outward.run.epoch_open, outward.run.batch_idx = True, batch_idx
        outward.fire("on_train_batch_start", batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Its metrics first; the loss as it was before the Trainer divided it."""
        outward = self._at(trainer)
        self._tell_log(outward)
        parts = trainer.accumulate_grad_batches
        if isinstance(outputs, Mapping) and "loss" in outputs and parts > 1:
            outputs = {**outputs, "loss": outputs["loss"] * parts}
        outward.fire("on_train_batch_end", outputs, batch, batch_idx)
        outward.agree()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """As ours."""
        self._at(trainer).fire("on_before_backward", loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """As ours."""
        self._at(trainer).fire("on_after_backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """As ours."""
        self._at(trainer).fire("on_before_optimizer_step", optimizer)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """As ours."""
        self._at(trainer).fire("on_before_zero_grad", optimizer)

    def _tell_log(self, outward: Outward) -> None:
        """``on_log`` with the metrics that are new."""
        if outward.has("on_log"):
            fresh = self._fresh.among(dict(outward.run.callback_metrics))
            if fresh:
                outward.fire("on_log", fresh, outward.run.global_step)

    # --- evaluation ---------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Not of the Trainer's trial before training."""
        if not trainer.sanity_checking:
            self._at(trainer).begin_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Its metrics after it, as in a plain loop."""
        if not trainer.sanity_checking:
            outward = self._at(trainer)
            outward.end_evaluation()
            self._tell_log(outward)
            outward.agree()

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """As ours."""
        if not trainer.sanity_checking:
            self._at(trainer).fire("on_validation_batch_start", *args)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """As ours."""
        if not trainer.sanity_checking:
            self._at(trainer).fire("on_validation_batch_end", *args)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """As ours."""
        self._at(trainer).begin_evaluation("test")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """As ours."""
        outward = self._at(trainer)
        outward.end_evaluation("test")
        self._tell_log(outward)

    def on_test_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """As ours."""
        self._at(trainer).fire("on_test_batch_start", *args)

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """As ours."""
        self._at(trainer).fire("on_test_batch_end", *args)


def _as_ours(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's checkpoint under the names of our training state."""
    place = {"global_step": checkpoint["global_step"], "current_epoch": checkpoint["epoch"]}
    return {
        "models": {"0": checkpoint["state_dict"]},
        "callbacks": checkpoint.get("callbacks", {}),
        "run": place,
    }
