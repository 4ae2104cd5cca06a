"""CometTracker: offline unless there is an API key."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from checkpoint_io.local_files import base_name, local_path
from loggers.base import RunInfo, Scalar, Status
from loggers.trackers.tool import ItemTracker, as_float, local_folder, run_name
from loggers.values import flat_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CometTracker"]

# By default Comet patches torch, reads sys.argv, wraps sys.stdout and prints a summary.
_CONFIG: dict[str, Any] = {
    "auto_metric_logging": False,
    "auto_param_logging": False,
    "auto_output_logging": False,
    "auto_log_co2": False,
    "log_graph": False,
    "parse_args": False,
    "display_summary_level": 0,
}


class CometTracker(ItemTracker):
    """Logs to a Comet experiment.

    The experiment is offline if there is no API key (variable, config file, ``api_key=``) and the
    mode is not set otherwise: at the end it is an archive in ``<logging_dir>/comet``, which ``comet
    upload`` sends. Until then it is in a temporary folder, so a killed process leaves no archive;
    offline, Comet keeps 15 000 values per metric. A resume continues under the same experiment key,
    offline in another archive. Strings become text samples. If the script has an open experiment,
    it is used, and not closed.

    Args:
        all_ranks: log on every rank, one experiment per rank.
        **options: arguments of ``comet_ml.start``; they override the defaults above.
            ``experiment_config`` may be a dict, merged over the default of no automatic logging.

    Raises:
        ImportError: from `start`, if comet_ml is not installed.
        ValueError: from `start`, if it would be offline and ``logging_dir`` is a remote URL.

    Example:
        >>> tracker = CometTracker(online=False, experiment_config={"log_code": False})
        >>> tracker.raw is None  # the comet_ml experiment, once started
        True
    """

    name = "comet"
    requires = ("comet_ml",)
    install = "comet-ml"

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record parameters, with names such as ``optimizer/lr``."""
        self._target().log_parameters(flat_config(config))

    def log(self, scalars: Mapping[str, Scalar], step: int, *, epoch: int | None = None) -> None:
        """Record metrics, and strings as text, at a step, metrics with an epoch too."""
        experiment = self._target()
        numbers = {k: as_float(v) for k, v in scalars.items() if not isinstance(v, str)}
        if numbers:
            at = {"step": step} if epoch is None else {"step": step, "epoch": epoch}
            experiment.log_metrics(numbers, **at)
        self.log_text({k: v for k, v in scalars.items() if isinstance(v, str)}, step)
        self._note_step(step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table as the file ``<name>-<step>.csv``."""
        data = [list(row) for row in rows]
        self._target().log_table(f"{name}-{step}.csv", tabular_data=data, headers=list(columns))

    def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Record histograms."""
        experiment = self._target()
        for name, values in histograms.items():
            experiment.log_histogram_3d(values, name=name, step=step)

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Record a file, or each file of a folder, as an asset."""
        experiment = self._target()
        if os.path.isdir(path):
            experiment.log_asset_folder(path, log_file_name=True, recursive=True)
        else:
            name = name or base_name(path)
            experiment.log_asset(path, file_name=name, metadata={"kind": kind})

    def _image(self, name: str, image: Any, step: int, caption: str | None = None) -> None:
        """Record an image; the caption is in its metadata."""
        metadata = {"caption": caption} if caption else None
        self._target().log_image(image, name=name, step=step, metadata=metadata)

    def _text(self, name: str, text: str, step: int) -> None:
        """Record a text sample; the name is in its metadata."""
        self._target().log_text(text, step=step, metadata={"name": name})

    def _audio(self, name: str, data: bytes, step: int, sample_rate: int) -> None:
        """Record a clip."""
        path = self._scratch.file(data, ".wav")
        self._target().log_audio(path, sample_rate=sample_rate, file_name=f"{name}.wav", step=step)

    def _video(self, name: str, data: bytes, step: int) -> None:
        """Record a video."""
        self._target().log_video(self._scratch.file(data, ".gif"), name=f"{name}.gif", step=step)

    def _tool_of_script(self) -> Any:
        running = self._package.get_running_experiment()
        return None if running is None or running.ended else running

    def _open(self, run: RunInfo, resumed: str | None) -> Any:
        """Call ``comet_ml.start``."""
        return self._package.start(**self._arguments(run, resumed))

    def _id(self) -> str:
        return str(self._tool.get_key())

    def _close(self, experiment: Any, status: Status) -> None:
        """Record the status under Other, because Comet has none, and end the experiment."""
        experiment.log_other("status", status)
        if not self._borrowed:
            experiment.end()

    def _arguments(self, run: RunInfo, resumed: str | None) -> dict[str, Any]:
        """Return the arguments of ``comet_ml.start``: defaults, overridden by the user's."""
        comet = self._package
        settings = comet.get_config()
        ours: dict[str, Any] = {"project_name": settings["comet.project_name"] or run.name}
        ours["mode"] = "get_or_create" if resumed else "create"
        if resumed:
            ours["experiment_key"] = resumed
        has_key = settings["comet.api_key"] or self._options.get("api_key")
        if not has_key and settings["comet.start.online"] is None:
            ours["online"] = False
        merged = {**ours, **self._options}
        experiment_config = self._options.get("experiment_config")
        if experiment_config is None or isinstance(experiment_config, Mapping):
            config = {**_CONFIG, "name": run_name(run), **(experiment_config or {})}
            if local_path(run.logging_dir) is not None or merged.get("online") is False:
                folder = local_folder(run, "comet", 'set "offline_directory"')
                config.setdefault("offline_directory", folder)
            os.makedirs(config.get("offline_directory") or ".", exist_ok=True)
            merged["experiment_config"] = comet.ExperimentConfig(**config)
        return merged
