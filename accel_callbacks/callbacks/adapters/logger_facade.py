"""A logger of Lightning that hands what it gets to the run's own trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks.integrations.lightning.packages import LightningPackage

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["logger_facade"]


class _Methods:
    """What the facade does; mixed into Lightning's Logger, so that it is one."""

    accel_run: TrainingRun

    @property
    def name(self) -> str:
        """The run's name."""
        return self.accel_run.name

    @property
    def version(self) -> str:
        """The run's id, which a resume keeps."""
        return self.accel_run.run_id

    @property
    def save_dir(self) -> str:
        """The project's folder."""
        return str(self.accel_run.accelerator.project_dir)

    @property
    def root_dir(self) -> str:
        """The same."""
        return self.save_dir

    @property
    def log_dir(self) -> str:
        """Where the trackers write."""
        return str(self.accel_run.accelerator.project_configuration.log_folder)

    @property
    def experiment(self) -> Any:
        """The first tracker's own tool, such as its SummaryWriter; None without trackers."""
        trackers = self.accel_run.accelerator.trackers
        return trackers[0].raw if trackers else None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """``accel.log``: to the callbacks and to all trackers."""
        self.accel_run.accelerator.log(dict(metrics), step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Into the run's config, and to the trackers."""
        values = dict(params if isinstance(params, Mapping) else vars(params))
        self.accel_run.config.update(values)
        hub = self.accel_run.accelerator.tracking.hub
        if hub is not None:
            hub.log_config(values)

    def __bool__(self) -> bool:
        return True


def logger_facade(package: LightningPackage, run: TrainingRun) -> Any:
    """An instance of the package's ``Logger`` over the run."""
    base = package.get("loggers.logger", "Logger")
    logger = type("RunLogger", (_Methods, base), {})()
    logger.accel_run = run
    return logger
