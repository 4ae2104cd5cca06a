"""TrainerFacade: the run under the names of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.addons.hosts.host import Missing
from accel_callbacks.addons.lightning.packages import (
    LightningPackage,
    unwrap_optimizer,
    unwrapped_optimizers,
)
from accel_callbacks.addons.lightning.trainer_parts import (
    AcceleratorConnectorFacade,
    LoggedValues,
    LoggerConnectorFacade,
    StrategyFacade,
    evaluation_loop_facade,
    fit_loop_facade,
    logger_facade,
)
from accel_callbacks.loop.run import length_of
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["MetricsView", "TrainerFacade"]


class TrainerFacade:
    """The run as one callback's Trainer; names that it lacks are looked up in the run.

    The constants are the Trainer's options that mean nothing in the user's own loop.

    Args:
        package: the callback's Lightning.
        missing: builds the error for a name that a plain loop does not have.
        log_every_n_steps: the Trainer's argument of this name.

    Attributes:
        accel_run: the current run.
        hook: the hook in which the callback is being called.
        epoch: overrides ``current_epoch`` in the deferred end of an earlier epoch.
        evaluated: number of batches of evaluations so far.
        stop_requested: the callback has set ``should_stop``.
    """

    barebones = False
    check_val_every_n_epoch = 1
    datamodule: Any = None
    detect_anomaly = False
    # Not known before the first validation; a callback that prepares for one in vain costs nothing.
    enable_validation = True
    gradient_clip_algorithm: Any = None
    gradient_clip_val: Any = None
    limit_predict_batches = 1.0
    limit_test_batches = 1.0
    limit_train_batches = 1.0
    limit_val_batches = 1.0
    max_time: Any = None
    min_epochs: int | None = None
    min_steps: int | None = None
    num_sanity_val_batches: tuple[int, ...] = ()
    num_sanity_val_steps = 0
    overfit_batches = 0.0
    received_sigterm = False
    reload_dataloaders_every_n_epochs = 0
    val_check_batch: Any = None
    val_check_interval = 1.0

    def __init__(
        self, package: LightningPackage, missing: Missing, log_every_n_steps: int = 50
    ) -> None:
        self.accel_run: TrainingRun = None  # type: ignore[assignment]
        self.hook = "setup"
        self.epoch: int | None = None
        self.evaluated = {"current": 0, "total": 0}
        self.log_every_n_steps = log_every_n_steps
        self.lightning_module: Any = None
        self.values = LoggedValues()
        self.stop_requested = False
        self._package = package
        self._missing = missing
        self._logger: Any = None
        self._cache: dict[str, Any] = {}
        self.fit_loop = fit_loop_facade(self, missing)
        self.validate_loop = evaluation_loop_facade(self, missing, "trainer.validate_loop")
        self.test_loop = evaluation_loop_facade(self, missing, "trainer.test_loop")
        self._evaluation_loop = self.validate_loop
        self._logger_connector = LoggerConnectorFacade(
            "trainer._logger_connector", missing, _trainer=self
        )
        self._accelerator_connector = AcceleratorConnectorFacade(
            "trainer._accelerator_connector", missing
        )
        self.strategy = StrategyFacade("trainer.strategy", missing, _trainer=self)
        self._ready = True  # from here on, __setattr__ checks names

    def bind(self, run: TrainingRun, hook: str) -> None:
        """Set the run and the hook that is being called."""
        vars(self).update(accel_run=run, hook=hook)

    def __getattr__(self, name: str) -> Any:
        known = vars(self)
        if name.startswith("__") or "_ready" not in known:
            raise AttributeError(name)
        run = known["accel_run"]
        if name.startswith("_") or not hasattr(run, name):
            raise known["_missing"](f"trainer.{name}")
        return getattr(run, name)

    def __setattr__(self, name: str, value: Any) -> None:
        known, target = vars(self), self
        attribute = getattr(type(self), name, None)
        if attribute is None and "_ready" in known and name not in known:
            # An option of the run, or an attribute by which callbacks share data.
            target = known["accel_run"]
            attribute = getattr(type(target), name, None)
        settable = isinstance(attribute, property) and attribute.fset is not None
        if attribute is not None and not settable:
            raise self._missing(f"to set trainer.{name}")
        object.__setattr__(target, name, value)

    # --- position -----------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """Index of the epoch."""
        return self.accel_run.current_epoch if self.epoch is None else self.epoch

    @property
    def should_stop(self) -> bool:
        """True if the run stops or this callback has requested it; set True to request it."""
        return self.stop_requested or self.accel_run.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.stop_requested = bool(value) and not self.accel_run.should_stop

    @property
    def state(self) -> Any:
        """Lightning's ``TrainerState`` with function and stage."""
        stage = "train" if self.training else "validate" if self.validating else "test"
        return self._package.get("trainer.states", "TrainerState")(
            status=self._package.get("trainer.states", "TrainerStatus").RUNNING,
            fn=self._package.get("trainer.states", "TrainerFn")("test" if self.testing else "fit"),
            stage=self._package.get("trainer.states", "RunningStage")(stage),
        )

    @property
    def training(self) -> bool:
        """True outside of evaluation hooks."""
        return not self.evaluating

    @property
    def validating(self) -> bool:
        """True in a hook of a validation."""
        return "validation" in self.hook

    @property
    def testing(self) -> bool:
        """True in a hook of a test."""
        return "on_test" in self.hook

    @property
    def evaluating(self) -> bool:
        """True in a hook of a validation or a test."""
        return self.validating or self.testing

    @property
    def num_training_batches(self) -> int | float:
        """Batches of a training epoch; ``inf`` if unknown."""
        return self.accel_run.num_training_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader that was iterated so far."""
        return self._lengths(self.accel_run.num_val_batches, self.validating)

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader that was iterated so far."""
        return self._lengths(self.accel_run.num_test_batches, self.testing)

    def _lengths(self, known: list[int | float], evaluating: bool) -> list[int | float]:
        """Return the known lengths with the one of the loader that is being iterated."""
        loop = self.accel_run.accelerator.loop
        index = loop.position.eval_loaders - 1
        if not evaluating or not loop.position.active or index < 0:
            return known
        current = length_of(loop.position.active[-1])
        known = known + [float("inf")] * (index + 1 - len(known))
        return [*known[:index], current, *known[index + 1 :]]

    # --- the parts ----------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Any]:
        """The user's optimizers, unwrapped."""
        return unwrapped_optimizers(self.accel_run)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The prepared schedulers as Lightning's configs; they step with the optimizers."""
        config = self._package.get("utilities.types", "LRSchedulerConfig")
        return [
            config(scheduler=_SchedulerView(prepared.scheduler), interval="step")
            for prepared in self.accel_run.accelerator.schedulers
        ]

    @property
    def callbacks(self) -> list[Any]:
        """All callbacks, those of Lightning without their adapters."""
        callbacks = self.accel_run.callbacks
        return [getattr(callback, "lightning_callback", callback) for callback in callbacks]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Lightning's callbacks that save."""
        return self._of_kind("callbacks.checkpoint", "Checkpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first of ``checkpoint_callbacks``."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Lightning's EarlyStopping callbacks."""
        return self._of_kind("callbacks.early_stopping", "EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first of ``early_stopping_callbacks``."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """Lightning's progress bar, if there is one."""
        return next(iter(self._of_kind("callbacks.progress.progress_bar", "ProgressBar")), None)

    def _of_kind(self, module: str, name: str) -> list[Any]:
        kind = self._package.get(module, name)
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    @property
    def callback_metrics(self) -> MetricsView:
        """The last values by name, as tensors."""
        return MetricsView(self.accel_run.callback_metrics)

    @property
    def logged_metrics(self) -> MetricsView:
        """The same as ``callback_metrics``."""
        return self.callback_metrics

    @property
    def logger(self) -> Any:
        """A Logger over the run's trackers, also without any."""
        run = self.accel_run
        if self._logger is None or self._logger.accel_run is not run:
            self._logger = logger_facade(self._package, run)
        return self._logger

    @property
    def loggers(self) -> list[Any]:
        """The logger, in a list."""
        return [self.logger]

    @property
    def accelerator(self) -> Any:
        """Lightning's Accelerator for this kind of device, which provides its statistics."""
        kind = self.accel_run.accelerator.device.type
        name = {"cuda": "CUDAAccelerator", "mps": "MPSAccelerator", "xla": "XLAAccelerator"}
        return self._create_once("accelerator", "accelerators", name.get(kind, "CPUAccelerator"))

    @property
    def precision_plugin(self) -> Any:
        """Lightning's Precision plugin for the run's precision."""
        precision = self.accel_run.precision
        if precision in ("16-mixed", "bf16-mixed"):
            device = self.accel_run.accelerator.device.type
            return self._create_once(
                "precision", "plugins.precision", "MixedPrecision", precision, device
            )
        return self._create_once("precision", "plugins.precision", "Precision")

    @property
    def profiler(self) -> Any:
        """A ``PassThroughProfiler``; ``accel.callback_report()`` has the times of callbacks."""
        return self._create_once("profiler", "profilers", "PassThroughProfiler")

    def _create_once(self, key: str, module: str, name: str, *args: Any) -> Any:
        if key not in self._cache:
            self._cache[key] = self._package.get(module, name)(*args)
        return self._cache[key]

    # --- methods ------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        filepath: str | PathLike[str],
        weights_only: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint folder at the path, or with ``weights_only`` the model's weights."""
        run = self.accel_run
        if self.hook == "on_exception" and collectives.world_size() > 1:
            warn(
                f"{fspath(filepath)} was not saved: a save is collective, and after an error the "
                "other ranks do not take part",
            )
        elif weights_only:
            model = run.model
            if model is None:
                raise ValueError("save_checkpoint(weights_only=True): no model is prepared.")
            run.accelerator.save_model(model, filepath, storage_options=storage_options)
        else:
            run.accelerator.checkpointer.write(fspath(filepath), storage_options=storage_options)

    def log_from_module(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log for ``pl_module.log``, with its arguments; all values go to the trackers."""
        self.values.log(
            self.accel_run,
            self.hook,
            name,
            value,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            batch_size=batch_size,
            sync_dist=sync_dist,
        )


class MetricsView(dict[str, torch.Tensor]):
    """The numbers of a mapping as tensors; assignments go to the mapping too.

    Tensors stay on their device; strings are left out.

    Args:
        metrics: ``run.callback_metrics``.
    """

    def __init__(self, metrics: dict[str, Any]) -> None:
        kinds = (torch.Tensor, int, float)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, kinds)}
        super().__init__({name: _tensor(value) for name, value in numbers.items()})
        self._metrics = metrics

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _tensor(value))
        self._metrics[name] = value

    def update(self, *args: Any, **values: Any) -> None:
        """Set several values."""
        for name, value in dict(*args, **values).items():
            self[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: deepcopy(value, memo) for name, value in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(float(value), device="cpu")


class _SchedulerView:
    """A scheduler with the unwrapped optimizer, which Lightning's callbacks look up by identity."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def optimizer(self) -> Any:
        return unwrap_optimizer(self._scheduler.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_scheduler":
            raise AttributeError(name)
        return getattr(self._scheduler, name)
