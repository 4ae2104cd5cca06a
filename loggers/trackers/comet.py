"""CometTracker: offline unless there is an API key."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loggers.base import RunInfo, Scalar, Status
from loggers.local_files import base_name, local_path
from loggers.multimedia.encode import figure_image, gif, named_images, wav
from loggers.multimedia.files import Scratch
from loggers.trackers.tool import (
    ToolTracker,
    as_float,
    local_folder,
    preserve_random_state,
    run_name,
)
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


class CometTracker(ToolTracker):
    """Logs to a Comet experiment.

    The experiment is offline if there is no API key (variable, config file, ``api_key=``) and the
    mode is not set otherwise: at the end it is an archive in ``<logging_dir>/comet``, which ``comet
    upload`` sends. Until then it is in a temporary folder, so a killed process leaves no archive;
    offline, Comet keeps 15 000 values per metric. A resume continues under the same experiment key,
    offline in another archive. Strings become text samples. If the script has an open experiment,
    it is used, and not closed.

    Args:
        all_ranks: log on every rank, one experiment per rank.
        **start_kwargs: arguments of ``comet_ml.start``; they override the defaults above.
            ``experiment_config`` may be a dict, merged over the default of no automatic logging.

    Raises:
        ImportError: from `start`, if comet_ml is not installed.
        ValueError: from `start`, if it would be offline and ``logging_dir`` is a remote URL.

    >>> tracker = CometTracker(online=False, experiment_config={"log_code": False})
    >>> tracker.raw is None  # the comet_ml experiment, once started
    True
    """

    name = "comet"
    requires = ("comet_ml",)
    install = "comet-ml"

    def __init__(self, *, all_ranks: bool = False, **start_kwargs: Any) -> None:
        super().__init__(all_ranks=all_ranks)
        self._start_kwargs = start_kwargs
        self._borrowed = False
        self._scratch = Scratch()

    def start(self, run: RunInfo) -> None:
        """Call ``comet_ml.start``, or use the experiment that is running."""
        comet = self._import("comet_ml")
        resumed = self._resumed_id(run)
        running = comet.get_running_experiment()
        self._borrowed = running is not None and not running.ended
        if self._borrowed:
            self._tool = running
        else:
            with preserve_random_state():
                self._tool = comet.start(**self._arguments(comet, run, resumed))
        self._run_id = str(self._tool.get_key())

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record parameters, with names such as ``optimizer/lr``."""
        self._opened().log_parameters(flat_config(config))

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        """Record metrics, and strings as text, at a step."""
        experiment = self._opened()
        numbers = {k: as_float(v) for k, v in scalars.items() if not isinstance(v, str)}
        if numbers:
            experiment.log_metrics(numbers, step=step)
        self.log_text({k: v for k, v in scalars.items() if isinstance(v, str)}, step)
        self._logged(step)

    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Record images; captions are in their metadata. Needs Pillow."""
        experiment = self._opened()
        for name, image, caption in named_images(images, captions):
            metadata = {"caption": caption} if caption else None
            experiment.log_image(image, name=name, step=step, metadata=metadata)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table as the file ``<name>-<step>.csv``."""
        data = [list(row) for row in rows]
        self._opened().log_table(f"{name}-{step}.csv", tabular_data=data, headers=list(columns))

    def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Record histograms."""
        experiment = self._opened()
        for name, values in histograms.items():
            experiment.log_histogram_3d(values, name=name, step=step)

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record text samples; the name is in their metadata."""
        experiment = self._opened()
        for name, text in texts.items():
            experiment.log_text(text, step=step, metadata={"name": name})

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Record audio as 16-bit WAV."""
        experiment = self._opened()
        for name, samples in audio.items():
            path = self._scratch.file(wav(samples, sample_rate), ".wav")
            experiment.log_audio(path, sample_rate=sample_rate, file_name=f"{name}.wav", step=step)

    def log_video(self, videos: Mapping[str, np.ndarray], step: int, *, fps: int = 4) -> None:
        """Record videos as GIF. Needs Pillow."""
        experiment = self._opened()
        for name, frames in videos.items():
            path = self._scratch.file(gif(frames, fps), ".gif")
            experiment.log_video(path, name=f"{name}.gif", step=step)

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures as images. Needs Pillow."""
        experiment = self._opened()
        for name, figure in figures.items():
            experiment.log_image(figure_image(figure), name=name, step=step)

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Record a file, or each file of a folder, as an asset."""
        experiment = self._opened()
        if os.path.isdir(path):
            experiment.log_asset_folder(path, log_file_name=True, recursive=True)
        else:
            named = name or base_name(path)
            experiment.log_asset(path, file_name=named, metadata={"kind": kind})

    def finish(self, status: Status = "success") -> None:
        """Record the status under Other, because Comet has none, and end the experiment."""
        self._end(status)
        experiment = self._release()
        if experiment is None:
            return
        experiment.log_other("status", status)
        try:
            if not self._borrowed:
                experiment.end()
        finally:
            self._scratch.close()

    def _arguments(self, comet: Any, run: RunInfo, resumed: str | None) -> dict[str, Any]:
        """Return the arguments of ``comet_ml.start``: defaults, overridden by the user's."""
        settings = comet.get_config()
        ours: dict[str, Any] = {"project_name": settings["comet.project_name"] or run.name}
        ours["mode"] = "get_or_create" if resumed else "create"
        if resumed:
            ours["experiment_key"] = resumed
        has_key = settings["comet.api_key"] or self._start_kwargs.get("api_key")
        if not has_key and settings["comet.start.online"] is None:
            ours["online"] = False
        merged = {**ours, **self._start_kwargs}
        given = self._start_kwargs.get("experiment_config")
        if given is None or isinstance(given, Mapping):
            config = {**_CONFIG, "name": run_name(run), **(given or {})}
            if local_path(run.logging_dir) is not None or merged.get("online") is False:
                folder = local_folder(run, "comet", 'set "offline_directory"')
                config.setdefault("offline_directory", folder)
            os.makedirs(config.get("offline_directory") or ".", exist_ok=True)
            merged["experiment_config"] = comet.ExperimentConfig(**config)
        return merged
