"""What a callback of Lightning sees as its trainer: the run, under the Trainer's names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from accel_callbacks import checkpointing, collectives
from accel_callbacks.callbacks.adapters.logged_values import LoggedValues
from accel_callbacks.callbacks.adapters.logger_facade import logger_facade
from accel_callbacks.callbacks.adapters.metrics_view import MetricsView
from accel_callbacks.callbacks.adapters.missing import Missing
from accel_callbacks.callbacks.adapters.strategy_facade import StrategyFacade
from accel_callbacks.callbacks.adapters.trainer_position import TrainerPosition
from accel_callbacks.callbacks.adapters.wrapped_parts import (
    bare_optimizers,
    lightning_callbacks,
    scheduler_configs,
)
from accel_callbacks.integrations.lightning.packages import LightningPackage
from accel_callbacks.integrations.lightning.trainer_parts import (
    LoggerConnectorFacade,
    evaluation_loop_facade,
    fit_loop_facade,
)

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["TrainerFacade"]


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
            checkpointing.write(run.accelerator, fspath(filepath), storage_options=storage_options)

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
