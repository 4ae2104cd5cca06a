"""The run under the Trainer's names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.integrations.host import Missing
from accel_callbacks.integrations.lightning.packages import (
    LightningPackage,
    bare_optimizers,
    lightning_callbacks,
    scheduler_configs,
)
from accel_callbacks.integrations.lightning.trainer_parts import (
    LoggedValues,
    LoggerConnectorFacade,
    StrategyFacade,
    evaluation_loop_facade,
    fit_loop_facade,
    logger_facade,
)
from accel_callbacks.loop.run import length_of

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["MetricsView", "TrainerConstants", "TrainerFacade", "TrainerPosition"]


class MetricsView(dict[str, torch.Tensor]):
    """Tensors for the numbers in a mapping; what is set here is set there too.

    Tensors stay on their device, texts are left out.

    Args:
        metrics: ``run.callback_metrics``.

    Example:
        >>> import torch
        >>> from accel_callbacks.integrations.lightning.trainer import MetricsView
        >>> metrics = {"loss": 0.5, "note": "warm"}
        >>> view = MetricsView(metrics)
        >>> view
        {'loss': tensor(0.5000)}
        >>> view["lr"] = torch.tensor(0.1)
        >>> sorted(metrics)
        ['loss', 'lr', 'note']
    """

    def __init__(self, metrics: dict[str, Any]) -> None:
        kinds = (torch.Tensor, int, float)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, kinds)}
        super().__init__({name: _tensor(value) for name, value in numbers.items()})
        self._behind = metrics

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _tensor(value))
        self._behind[name] = value

    def update(self, *args: Any, **values: Any) -> None:
        """Set several."""
        for name, value in dict(*args, **values).items():
            self[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: deepcopy(value, memo) for name, value in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(float(value))


class TrainerConstants:
    """The loop is the user's: what the Trainer would limit, repeat or check is as it is there.

    Example:
        >>> from accel_callbacks.integrations.lightning.trainer import TrainerConstants
        >>> TrainerConstants.check_val_every_n_epoch
        1
    """

    barebones = False
    check_val_every_n_epoch = 1
    datamodule: Any = None
    detect_anomaly = False
    # Unknown before the loop has done it; what is made for a validation and not used costs nothing.
    enable_validation = True
    fast_dev_run = False
    gradient_clip_algorithm: Any = None
    gradient_clip_val: Any = None
    limit_predict_batches = 1.0
    limit_test_batches = 1.0
    limit_train_batches = 1.0
    limit_val_batches = 1.0
    max_steps = -1
    max_time: Any = None
    min_epochs: int | None = None
    min_steps: int | None = None
    num_sanity_val_batches: tuple[int, ...] = ()
    num_sanity_val_steps = 0
    overfit_batches = 0.0
    predicting = False
    received_sigterm = False
    reload_dataloaders_every_n_epochs = 0
    sanity_checking = False
    val_check_batch: Any = None
    val_check_interval = 1.0


class TrainerPosition(TrainerConstants):
    """The part of the trainer that tells epoch, stage and stop.

    Example:
        >>> from accel_callbacks.integrations.lightning.trainer import TrainerPosition
        >>> TrainerPosition.sanity_checking
        False
    """

    accel_run: TrainingRun
    hook: str
    epoch: int | None
    asked_to_stop: bool
    _package: LightningPackage

    @property
    def current_epoch(self) -> int:
        """Index of the epoch."""
        return self.accel_run.current_epoch if self.epoch is None else self.epoch

    @property
    def should_stop(self) -> bool:
        """The run stops, or this callback has asked for it; set it to True to ask."""
        return self.asked_to_stop or self.accel_run.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.asked_to_stop = bool(value) and not self.accel_run.should_stop

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of a step; settable."""
        return self.accel_run.accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self.accel_run.accumulate_grad_batches = value

    @property
    def state(self) -> Any:
        """Lightning's own record of function and stage."""
        stage = "train" if self.training else "validate" if self.validating else "test"
        return self._package.get("trainer.states", "TrainerState")(
            status=self._package.get("trainer.states", "TrainerStatus").RUNNING,
            fn=self._package.get("trainer.states", "TrainerFn")("test" if self.testing else "fit"),
            stage=self._package.get("trainer.states", "RunningStage")(stage),
        )

    @property
    def training(self) -> bool:
        """In no evaluation."""
        return not self.evaluating

    @property
    def validating(self) -> bool:
        """In a hook of a validation."""
        return "validation" in self.hook

    @property
    def testing(self) -> bool:
        """In a hook of a test."""
        return "on_test" in self.hook

    @property
    def evaluating(self) -> bool:
        """In a hook of either."""
        return self.validating or self.testing

    @property
    def num_training_batches(self) -> int | float:
        """Batches of a training epoch; before the first, those of the first prepared loader."""
        run = self.accel_run
        loaders = run.accelerator.loaders
        if run.train_dataloader is None and loaders:
            return length_of(loaders[0])
        return run.num_training_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader, as far as they are known."""
        return self._lengths(self.accel_run.num_val_batches, self.validating)

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader, as far as they are known."""
        return self._lengths(self.accel_run.num_test_batches, self.testing)

    def _lengths(self, known: list[int | float], now: bool) -> list[int | float]:
        """With that of the loader which is being iterated in its place."""
        loop = self.accel_run.accelerator.loop
        place = loop.eval_loaders - 1
        if not now or not loop.active or place < 0:
            return known
        here = length_of(loop.active[-1])
        known = known + [float("inf")] * (place + 1 - len(known))
        return [*known[:place], here, *known[place + 1 :]]


class TrainerFacade(TrainerPosition):
    """One callback's view of the run; names that are not here are asked of the run itself.

    Args:
        package: the callback's Lightning.
        missing: the error for what a plain loop does not have.
        log_every_n_steps: as the Trainer's argument of this name.

    Attributes:
        accel_run: the run as it is now.
        hook: the hook in which the callback is being called.
        epoch: shown as ``current_epoch`` while the end of an earlier epoch is caught up on.
        evaluated: batches of evaluations so far.
    """

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
        self.asked_to_stop = False
        self._package = package
        self._missing = missing
        self._logger: Any = None
        self._made: dict[str, Any] = {}
        self.fit_loop = fit_loop_facade(self, missing)
        self.validate_loop = evaluation_loop_facade(self, missing, "trainer.validate_loop")
        self.test_loop = evaluation_loop_facade(self, missing, "trainer.test_loop")
        self._evaluation_loop = self.validate_loop
        self._logger_connector = LoggerConnectorFacade(
            "trainer._logger_connector", missing, _trainer=self
        )
        self.strategy = StrategyFacade("trainer.strategy", missing, _trainer=self)
        self._ready = True

    def show(self, run: TrainingRun, hook: str) -> None:
        """This run and this hook, from now on."""
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
        known = vars(self)
        place = getattr(type(self), name, None)
        fixed = isinstance(place, property) and place.fset is None
        if fixed or (place is not None and not isinstance(place, property)):
            raise self._missing(f"to set trainer.{name}")
        if isinstance(place, property) or name in known or "_ready" not in known:
            object.__setattr__(self, name, value)
        else:  # notes that callbacks leave for each other
            setattr(self.accel_run, name, value)

    # --- the parts ----------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Any]:
        """The user's optimizers, without what ``prepare`` put around them."""
        return bare_optimizers(self.accel_run)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The prepared schedulers in Lightning's records."""
        return scheduler_configs(self._package, self.accel_run)

    @property
    def callbacks(self) -> list[Any]:
        """All callbacks, Lightning's as the user gave them."""
        return lightning_callbacks(self.accel_run)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Those of Lightning that save."""
        return self._of_kind("callbacks.checkpoint", "Checkpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first of them."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Lightning's EarlyStopping callbacks."""
        return self._of_kind("callbacks.early_stopping", "EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first of them."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """Lightning's progress bar, if there is one."""
        return next(iter(self._of_kind("callbacks.progress.progress_bar", "ProgressBar")), None)

    def _of_kind(self, module: str, name: str) -> list[Any]:
        kind = self._get(module, name)
        return [one for one in self.callbacks if isinstance(one, kind)]

    @property
    def callback_metrics(self) -> MetricsView:
        """The last values, as tensors."""
        return MetricsView(self.accel_run.callback_metrics)

    @property
    def logged_metrics(self) -> MetricsView:
        """The same."""
        return self.callback_metrics

    @property
    def logger(self) -> Any:
        """A logger over the run's trackers; there is one even without trackers."""
        run = self.accel_run
        if self._logger is None or self._logger.accel_run is not run:
            self._logger = logger_facade(self._package, run)
        return self._logger

    @property
    def loggers(self) -> list[Any]:
        """The same in a list."""
        return [self.logger]

    @property
    def accelerator(self) -> Any:
        """Lightning's object for this kind of device, which knows its statistics."""
        kind = self.accel_run.accelerator.device.type
        name = {"cuda": "CUDAAccelerator", "mps": "MPSAccelerator", "xla": "XLAAccelerator"}
        return self._once("accelerator", "accelerators", name.get(kind, "CPUAccelerator"))

    @property
    def precision_plugin(self) -> Any:
        """Lightning's object for the type that is computed in."""
        precision = self.accel_run.precision
        if precision in ("16-mixed", "bf16-mixed"):
            device = self.accel_run.accelerator.device.type
            return self._once("precision", "plugins.precision", "MixedPrecision", precision, device)
        return self._once("precision", "plugins.precision", "Precision")

    @property
    def profiler(self) -> Any:
        """Lightning's profiler that measures nothing; ``accel.callback_report()`` does."""
        return self._once("profiler", "profilers", "PassThroughProfiler")

    def _get(self, module: str, name: str) -> Any:
        return self._package.get(module, name)

    def _once(self, key: str, module: str, name: str, *args: Any) -> Any:
        if key not in self._made:
            self._made[key] = self._get(module, name)(*args)
        return self._made[key]

    # --- what a callback does -----------------------------------------------------------------

    def save_checkpoint(
        self,
        filepath: str | PathLike[str],
        weights_only: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint folder at the path, or with ``weights_only`` the model's weights."""
        run = self.accel_run
        if self.hook == "on_exception" and collectives.world_size() > 1:
            warnings.warn(
                f"{fspath(filepath)} was not saved: after an error the processes cannot save "
                "together",
                stacklevel=2,
            )
        elif weights_only:
            model = run.accelerator.models[0]
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
        """``pl_module.log``, with its arguments; all values go to the trackers."""
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
