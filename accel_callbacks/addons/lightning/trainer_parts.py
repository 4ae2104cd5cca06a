"""Parts of the Trainer: fit_loop, strategy, logger, and the values of module.log."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_callbacks import collectives
from accel_callbacks.addons.hosts.host import Missing, Part
from accel_callbacks.addons.lightning.packages import LightningPackage
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.addons.lightning.trainer import TrainerFacade
    from accel_callbacks.loop.run import TrainingRun

__all__ = [
    "AcceleratorConnectorFacade",
    "LoggedValues",
    "LoggerConnectorFacade",
    "StrategyFacade",
    "evaluation_loop_facade",
    "fit_loop_facade",
    "logger_facade",
    "remove_saved",
]

_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
_WEIGHTS = re.compile(r"model.*\.safetensors|model\.safetensors\.index\.json", re.DOTALL)
#: Trackers whose own objects callbacks for Lightning expect of a logger.
_LIGHTNINGS_TRACKERS = ("tensorboard", "wandb")
#: Attributes of the strategy that the trainer has too.
_OF_TRAINER = (
    "accelerator",
    "global_rank",
    "is_global_zero",
    "lightning_module",
    "optimizers",
    "precision_plugin",
    "world_size",
)


class _Pending(NamedTuple):
    """The value of an epoch so far; ``weight`` is the number of samples if it is a mean."""

    total: Any
    weight: float
    reduction: str
    forked: bool  # logged at each step too, so the names get the suffixes _step and _epoch


class LoggedValues:
    """Logs values through ``accel.log``, those of an epoch at its end.

    Tensors stay on their device. A metric of torchmetrics is computed and reset at the end.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.addons.lightning.trainer_parts import LoggedValues
        >>> run = Accelerator(cpu=True).current_run
        >>> values = LoggedValues()
        >>> for value in (1.0, 2.0):
        ...     values.log(run, "on_validation_batch_end", "loss", value)
        >>> run.callback_metrics
        {}
        >>> values.flush(run)
        >>> float(run.callback_metrics["loss"])
        1.5
    """

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}

    def log(
        self,
        run: TrainingRun,
        hook: str,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        sync_dist: bool = False,
    ) -> None:
        """Log now, at the end of the epoch, or both; the default depends on the hook.

        Raises:
            ValueError: ``reduce_fx`` is not mean, sum, min or max.
        """
        in_batch = "batch" in hook or "backward" in hook or "optimizer" in hook or "grad" in hook
        training = in_batch and "validation" not in hook and "test" not in hook
        on_step = training if on_step is None else on_step
        on_epoch = not training if on_epoch is None else on_epoch
        reduction = _reduction(reduce_fx)
        if isinstance(value, torch.Tensor):
            value = value.detach()
        if sync_dist and not _is_metric(value):
            value = run.accelerator.reduce(_as_tensor(value), reduction)
        if on_step or (on_epoch and not in_batch and not _is_metric(value)):
            forked = on_step and on_epoch and in_batch
            now = value._forward_cache if _is_metric(value) else value
            run.accelerator.log({f"{name}_step" if forked else name: now})
        if on_epoch and (in_batch or _is_metric(value)):
            self._add(name, value, reduction, batch_size or 1, forked=on_step)

    def _add(self, name: str, value: Any, reduction: str, batch_size: int, *, forked: bool) -> None:
        before = self._pending.get(name)
        if _is_metric(value):
            self._pending[name] = _Pending(value, 1, "metric", forked)
            return
        weight = batch_size if reduction == "mean" else 1
        total = _as_tensor(value).to(torch.get_default_dtype()) * weight
        if before is not None:
            total = _REDUCTIONS[reduction](before.total, total.to(before.total.device))
            weight += before.weight  # type: ignore[assignment]
        self._pending[name] = _Pending(total, weight, reduction, forked)

    def flush(self, run: TrainingRun) -> None:
        """Log the values of the epoch, and reset them."""
        pending, self._pending = self._pending, {}
        if not pending:
            return
        values = {name: _result(entry) for name, entry in pending.items()}
        run.accelerator.log(
            {f"{name}_epoch" if pending[name].forked else name: v for name, v in values.items()}
        )
        run.callback_metrics.update(values)


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def _result(entry: _Pending) -> Any:
    if entry.reduction == "metric":
        value = entry.total.compute()
        entry.total.reset()
        return value
    return entry.total / entry.weight if entry.reduction == "mean" else entry.total


def _is_metric(value: Any) -> bool:
    """Return whether the value is a metric of torchmetrics, judged by its methods."""
    return callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None))


def _reduction(reduce_fx: Any) -> str:
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name = {"amin": "min", "amax": "max", "avg": "mean"}.get(name, name)
    if name not in _REDUCTIONS:
        raise ValueError(f"reduce_fx={reduce_fx!r}: use 'mean', 'sum', 'min' or 'max'.")
    return name


class _LoggerMethods:
    """The methods of a Logger over the run's trackers; mixed into Lightning's Logger."""

    accel_run: TrainingRun

    @property
    def name(self) -> str:
        """The run's name."""
        return self.accel_run.name

    @property
    def version(self) -> str:
        """The run's id, which survives a resume."""
        return self.accel_run.run_id

    @property
    def save_dir(self) -> str:
        """The project folder."""
        return str(self.accel_run.accelerator.project_dir)

    @property
    def root_dir(self) -> str:
        """The project folder."""
        return self.save_dir

    @property
    def log_dir(self) -> str:
        """The folder of the trackers' files."""
        return self.accel_run.log_dir

    @property
    def experiment(self) -> Any:
        """The SummaryWriter or W&B run if there is one, else the first tracker's own object.

        None without trackers.
        """
        trackers = self.accel_run.accelerator.trackers
        known = [tracker for tracker in trackers if tracker.name in _LIGHTNINGS_TRACKERS]
        return next((tracker.raw for tracker in [*known, *trackers]), None)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log to the callbacks and to all trackers, as ``accel.log`` does."""
        self.accel_run.accelerator.log(dict(metrics), step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Add hyperparameters to the run's config, and log them to the trackers."""
        values = dict(params if isinstance(params, Mapping) else vars(params))
        self.accel_run.config.update(values)
        hub = self.accel_run.accelerator.tracking.hub
        if hub is not None:
            hub.log_config(values)

    def __bool__(self) -> bool:
        return True


def logger_facade(package: LightningPackage, run: TrainingRun) -> Any:
    """Return an instance of the package's ``Logger`` over the run."""
    base = package.get("loggers.logger", "Logger")
    logger = type("RunLogger", (_LoggerMethods, base), {})()
    logger.accel_run = run
    return logger


def remove_saved(path: str, run_id: str) -> None:
    """Remove the checkpoint (or the saved weights) at a path, if this run wrote it.

    A checkpoint of another run is kept, with a warning. A missing one is ignored.

    Example:
        >>> import checkpoint_io
        >>> from accel_callbacks.addons.lightning.trainer_parts import remove_saved
        >>> _ = checkpoint_io.save("memory://doc-removal/a.ckpt", {}, metadata={"run_id": "r1"})
        >>> remove_saved("memory://doc-removal/a.ckpt", "r1")
        >>> checkpoint_io.CheckpointFolder("memory://doc-removal").latest() is None
        True
    """
    from checkpoint_io import CheckpointError, read_manifest
    from checkpoint_io.folder import remove_checkpoint
    from checkpoint_io.storage import open_store

    store = open_store(path, {})
    present = set(store.sizes())
    if not present:
        return
    if all(_WEIGHTS.fullmatch(name) for name in present):
        store.remove_many(sorted(present))
        store.remove_folder()
        return
    try:
        manifest = read_manifest(path, tensors=False)
    except CheckpointError as error:
        warn(f"{path} was not removed: {error}")
        return
    if manifest.metadata.get("run_id") != run_id:
        warn(f"{path} was not removed: another run wrote it")
        return
    with store.lock():
        remove_checkpoint(store, manifest)


class StrategyFacade(Part):
    """Ranks, device and checkpoints of the run, under the names of Lightning's Strategy."""

    _trainer: TrainerFacade

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name) if name in _OF_TRAINER else super().__getattr__(name)

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self._trainer.accel_run.accelerator.device
        return device

    @property
    def model(self) -> Any:
        """The prepared model, with its wrapper."""
        run = self._trainer.accel_run
        pairs = zip(run.accelerator.models, run.models, strict=True)
        return next((wrapped for wrapped, bare in pairs if bare is run.model), None)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        collectives.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank on all ranks."""
        return collectives.broadcast_object(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if the decision is True on all ranks, or with ``all=False`` on any."""
        decision = bool(decision)
        if collectives.world_size() == 1:
            return decision
        if all:
            return not collectives.any_process(not decision)
        return collectives.any_process(decision)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors over all ranks."""
        name = "mean" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower()
        return collectives.reduce(tensor, "mean" if name in ("mean", "avg") else name)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather tensors of all ranks along a new first dimension."""
        if collectives.world_size() == 1:
            return tensor
        return collectives.map_tensors(tensor, lambda leaf: collectives.gather(leaf[None]))

    def remove_checkpoint(self, filepath: str) -> None:
        """Remove a checkpoint that this run has saved, on rank 0."""
        if self.is_global_zero:
            remove_saved(str(filepath), self._trainer.accel_run.run_id)


class AcceleratorConnectorFacade(Part):
    """``trainer._accelerator_connector``, which callbacks of other packages ask for the ranks."""

    @property
    def is_distributed(self) -> bool:
        """True with several ranks."""
        return collectives.world_size() > 1


class _FitLoop(Part):
    """``trainer.fit_loop``."""

    _trainer: TrainerFacade

    @property
    def max_epochs(self) -> int | None:
        """The argument of ``run.epochs``."""
        return self._trainer.accel_run.max_epochs

    @property
    def total_batch_idx(self) -> int:
        """Index of the training batch over all epochs."""
        run = self._trainer.accel_run
        batches = run.num_training_batches
        before = 0 if math.isinf(batches) else run.current_epoch * int(batches)
        return before + run.batch_idx

    @property
    def batch_idx(self) -> int:
        """Index of the training batch in its epoch."""
        return self._trainer.accel_run.batch_idx

    def _should_accumulate(self) -> bool:
        """Return whether the gradient window continues after this batch."""
        return self._trainer.accel_run.in_window


class _EpochLoop(Part):
    """``trainer.fit_loop.epoch_loop``."""

    _trainer: TrainerFacade

    @property
    def _batches_that_stepped(self) -> int:
        """The step that Lightning's loggers use."""
        return self._trainer.accel_run.global_step

    global_step = _batches_that_stepped

    @property
    def total_batch_idx(self) -> int:
        """Index of the training batch over all epochs."""
        return int(self._trainer.fit_loop.total_batch_idx)

    @property
    def batch_progress(self) -> Part:
        """Progress within the epoch and over all epochs."""
        run, missing = self._trainer.accel_run, self._missing
        path = f"{self._path}.batch_progress"
        ready = run.batch_idx + 1
        return Part(
            path,
            missing,
            is_last_batch=run.is_last_batch,
            current=_progress(f"{path}.current", missing, ready),
            total=_progress(f"{path}.total", missing, self.total_batch_idx + 1),
        )

    def _should_check_val_epoch(self) -> bool:
        """Return whether the epoch has a validation, False before the first one."""
        return bool(self._trainer.accel_run.num_val_batches)


class _EvaluationLoop(Part):
    """``trainer.validate_loop`` and ``trainer.test_loop``."""

    _trainer: TrainerFacade
    _batches: dict[str, int]

    @property
    def _has_run(self) -> bool:
        """True once a validation has run."""
        return bool(self._trainer.accel_run.num_val_batches)

    @property
    def batch_progress(self) -> Part:
        """Progress within this evaluation and over all."""
        path, missing = f"{self._path}.batch_progress", self._missing
        return Part(
            path,
            missing,
            current=_progress(f"{path}.current", missing, self._batches["current"]),
            total=_progress(f"{path}.total", missing, self._batches["total"]),
        )


def _progress(path: str, missing: Missing, ready: int) -> Part:
    return Part(path, missing, ready=ready, started=ready, processed=ready, completed=ready)


class LoggerConnectorFacade(Part):
    """``trainer._logger_connector``."""

    _trainer: TrainerFacade

    @property
    def should_update_logs(self) -> bool:
        """True if ``log_every_n_steps`` divides this step, or this batch of an evaluation."""
        trainer = self._trainer
        every = trainer.log_every_n_steps
        if not every:
            return False
        if trainer.evaluating:
            step = trainer._evaluation_loop.batch_progress.current.ready
        else:
            step = trainer.global_step + 1  # as in Lightning: it is read before the step too
        return bool(step % every == 0 or trainer.should_stop)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log under the optimizer step, because steps of trackers must not decrease."""
        if metrics:
            self._trainer.accel_run.accelerator.log(metrics)


def fit_loop_facade(trainer: TrainerFacade, missing: Missing) -> Part:
    """Return ``trainer.fit_loop`` with its epoch loop and the validation loop in that."""
    path = "trainer.fit_loop.epoch_loop"
    val_loop = evaluation_loop_facade(trainer, missing, f"{path}.val_loop")
    epoch_loop = _EpochLoop(path, missing, _trainer=trainer, val_loop=val_loop)
    return _FitLoop("trainer.fit_loop", missing, _trainer=trainer, epoch_loop=epoch_loop)


def evaluation_loop_facade(trainer: TrainerFacade, missing: Missing, path: str) -> Part:
    """Return the loop of an evaluation, with the trainer's counts of batches."""
    return _EvaluationLoop(path, missing, _trainer=trainer, _batches=trainer.evaluated)
