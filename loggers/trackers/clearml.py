"""ClearMLTracker: offline unless a server is configured."""

from __future__ import annotations

import importlib
import io
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loggers.base import RunInfo, Scalar, Status
from loggers.multimedia.encode import histogram
from loggers.trackers.tool import ItemTracker, as_float, local_folder, run_name
from loggers.values import flat_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ClearMLTracker"]

_OFFLINE_ID = "offline-"

_PATCHED = (
    "catboost detect_repository fastai gradio hydra joblib lightgbm matplotlib megengine pytorch "
    "scikit tensorboard tensorflow tfdefines xgboost"
)

# By default ClearML patches torch, matplotlib, argparse and sys.stdout, and detect_repository would
# record this file as the script.
_ARGUMENTS: dict[str, Any] = {
    "reuse_last_task_id": False,
    "auto_connect_arg_parser": False,
    "auto_connect_frameworks": dict.fromkeys(_PATCHED.split(), False),
    "auto_connect_streams": False,
}


class ClearMLTracker(ItemTracker):
    """Logs to a ClearML task.

    Without a server (no ``clearml.conf``, no credentials in the environment) the task is offline,
    in ``<logging_dir>/clearml/offline/<task id>``. At the end a ZIP file is written next to it,
    which ``clearml.Task.import_offline_session`` uploads. ClearML always records the last task in
    ``~/.clearml``. A resume continues the same task. ``train/loss`` is the series "loss" of the
    plot "train". NaN and infinities are lines of the console log, because ClearML would record them
    as 0. ClearML is kept from reseeding the random generators. If the script has an open task, it
    is used, and not closed.

    Args:
        all_ranks: log on every rank; ClearML has one task per process.
        offline: whether the task is offline; None (default) as described above.
        **options: arguments of ``clearml.Task.init``; they override the defaults above.

    Raises:
        ImportError: from `start`, if clearml is not installed.
        ValueError: from `start`, if it would be offline and ``logging_dir`` is a remote URL.

    Example:
        >>> tracker = ClearMLTracker(offline=True, tags=["baseline"])
        >>> tracker.raw is None  # the clearml Task, once started
        True
    """

    name = "clearml"
    requires = ("clearml",)
    install = "clearml"

    def __init__(
        self, *, all_ranks: bool = False, offline: bool | None = None, **options: Any
    ) -> None:
        super().__init__(all_ranks=all_ranks, **options)
        self._offline = offline

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record hyperparameters; ``optimizer/lr`` is "lr" in the section "optimizer"."""
        self._target().set_parameters(flat_config(config))

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        """Report scalars at a step; strings, NaN and infinities go to the console log."""
        logger = self._target().get_logger()
        for name, value in scalars.items():
            number = math.nan if isinstance(value, str) else as_float(value)
            if math.isfinite(number):
                logger.report_scalar(*_title_and_series(name), number, iteration=step)
            else:
                self._text(name, str(value), step)
        self._note_step(step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table."""
        table = [list(columns), *(list(row) for row in rows)]
        logger = self._target().get_logger()
        logger.report_table(*_title_and_series(name), iteration=step, table_plot=table)

    def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Record histograms, in 64 bins."""
        logger = self._target().get_logger()
        for name, values in histograms.items():
            bins = histogram(values)
            labels = [f"{edge:.4g}" for edge in bins["edges"][:-1]]
            title, series = _title_and_series(name)
            logger.report_histogram(
                title, series, values=bins["counts"], iteration=step, xlabels=labels
            )

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Upload a file, or a folder as a ZIP file."""
        name = name or os.path.basename(os.path.normpath(path))
        self._target().upload_artifact(name, path, metadata={"kind": kind})

    def flush(self) -> None:
        """Trigger a flush of ClearML's thread, without waiting for it."""
        self._target().flush()

    def _image(self, name: str, image: Any, step: int, caption: str | None = None) -> None:
        """Record an image, as JPEG; the caption is not recorded."""
        logger = self._target().get_logger()
        logger.report_image(*_title_and_series(name), iteration=step, image=image)

    def _text(self, name: str, text: str, step: int) -> None:
        """Add a line to the console log of the task, without printing it."""
        logger = self._target().get_logger()
        logger.report_text(f"[{step}] {name}: {text}", print_console=False)

    def _audio(self, name: str, data: bytes, step: int, sample_rate: int) -> None:
        """Record a clip."""
        self._media(name, data, ".wav", step)

    def _video(self, name: str, data: bytes, step: int) -> None:
        """Record a video."""
        self._media(name, data, ".gif", step)

    def _media(self, name: str, data: bytes, suffix: str, step: int) -> None:
        title, series = _title_and_series(name)
        logger = self._target().get_logger()
        logger.report_media(
            title, series, iteration=step, stream=io.BytesIO(data), file_extension=suffix
        )

    def _tool_of_script(self) -> Any:
        return self._package.Task.current_task()

    def _open(self, run: RunInfo, resumed: str | None) -> Any:
        """Call ``Task.init``; after a resume, disable ClearML's offset of the steps."""
        task_class = self._package.Task
        self._go_offline(run)
        task_class.set_random_seed(None)  # otherwise it reseeds all generators
        offline = task_class.is_offline()
        same_mode = resumed is not None and resumed.startswith(_OFFLINE_ID) == offline
        ours = {
            "project_name": run.name,
            "task_name": run_name(run),
            "continue_last_task": resumed if same_mode else False,
            **_ARGUMENTS,
        }
        if offline:  # its thread delays the end, and nothing it measures is needed
            ours["auto_resource_monitoring"] = False
        task = task_class.init(**{**ours, **self._options})
        if same_mode:
            task.set_initial_iteration(0)
        elif resumed is not None:
            self._warn_once(
                "mode",
                f"the task {resumed} is {'online' if offline else 'offline'} and this process is "
                "not: it logs to a task of its own",
            )
        return task

    def _close(self, task: Any, status: Status) -> None:
        """Close the task as completed, failed or stopped; offline the status is a property."""
        if self._borrowed:
            return
        task.set_user_properties(status=status)
        if not self._package.Task.is_offline():
            task.flush(wait_for_uploads=True)
            _mark_status(task, status)
        task.close()

    def _go_offline(self, run: RunInfo) -> None:
        """Set ClearML to offline mode, below ``logging_dir``, if applicable."""
        task_class = self._package.Task
        wanted = not _has_server() if self._offline is None else self._offline
        if not wanted and not task_class.is_offline():
            return
        folder = local_folder(run, "clearml", "configure a server")
        config = self._import("clearml.config")
        # With the writer in a subprocess, which is the default, the end takes 12 seconds.
        ours = {
            "storage": {"cache": {"default_base_dir": folder}},
            "development": {"report_use_subprocess": False},
        }
        if "CLEARML_CACHE_DIR" in os.environ:
            del ours["storage"]
        config.config_obj.set_overrides({"sdk": ours})
        config.ConfigSDKWrapper.clear_config_impl()  # it caches values
        # Never reset: after the end, ClearML's threads would look for a server.
        task_class.set_offline(True)


def _title_and_series(name: str) -> tuple[str, str]:
    """Split ``train/loss`` into the plot "train" and its series "loss"."""
    title, separator, series = name.rpartition("/")
    return (title, series) if separator and title and series else (name, name)


def _mark_status(task: Any, status: Status) -> None:
    """Set the status of the task on the server."""
    if status == "failed":
        task.mark_failed(status_reason="the run failed")
    elif status == "interrupted":
        task.mark_stopped(status_message="the run was interrupted")
    else:
        task.mark_completed()


def _has_server() -> bool:
    """Return whether ClearML has credentials, or runs under an agent that has them."""
    session = importlib.import_module("clearml.backend_api").Session
    defs = importlib.import_module("clearml.backend_config.defs")
    names = ("API_ACCESS_KEY", "AUTH_TOKEN", "TASK_ID", "PROC_MASTER_ID")
    in_environment = any(
        os.environ.get(f"{tool}_{n}") for tool in ("CLEARML", "TRAINS") for n in names
    )
    return in_environment or defs.get_active_config_file() is not None or bool(session.default_key)
