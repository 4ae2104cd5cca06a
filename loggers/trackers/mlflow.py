"""MLflow, in a database below the logging folder unless a tracking server is configured."""

from __future__ import annotations

import importlib.util
import json
import os
import posixpath
import re
import time as clock
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from loggers.base import RunInfo, Scalar, Status
from loggers.multimedia.files import named_pictures
from loggers.trackers.line_file import is_remote
from loggers.trackers.tool import ToolTracker, as_float, local_folder, name_of_run
from loggers.values import flat_config, plain_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MLflowTracker"]

_STATUS: dict[str, str] = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

# What the servers refuse beyond.
_PER_BATCH, _TAGS_PER_BATCH = 1000, 100
_LONGEST_NAME, _LONGEST_PARAM, _LONGEST_TAG = 250, 6000, 8000


class MLflowTracker(ToolTracker):
    """Logs to an MLflow run: scalars as metrics, the config as parameters and ``config.json``.

    Without ``tracking_uri``, what MLflow is told elsewhere counts (``MLFLOW_TRACKING_URI``,
    ``mlflow.set_tracking_uri``); without that, it is the database
    ``<logging_dir>/mlflow/mlflow.db`` (or a folder of files there, if ``MLFLOW_ALLOW_FILE_STORE``
    is true). A resume goes on in the same run; values of steps that are done again are there twice,
    for MLflow cannot take any back. Strings become tags. A run that the script has active is left
    alone.

    Args:
        all_ranks: log on every process, one MLflow run a rank.
        tracking_uri: server, database or folder; None (default) as said above.
        experiment_name: default the run's ``name``.
        run_name: default the run's id.
        run_id: an MLflow run to go on with, default a new one.
        tags: further tags of the run.
        description: the run's note.
        artifact_location: where a new experiment keeps its files, default below ``logging_dir``
            with a local database, else as the server says.

    Raises:
        ImportError: from `start`, when mlflow is not installed, or what a database needs.
        ValueError: from `start`, when nothing is configured and ``logging_dir`` is a remote URL.

    >>> tracker = MLflowTracker(experiment_name="digits", tags={"team": "vision"})
    >>> tracker.raw is None  # the MlflowClient, once started
    True
    """

    name = "mlflow"
    requires = ("mlflow",)
    install = "mlflow-skinny sqlalchemy alembic"

    def __init__(
        self,
        *,
        all_ranks: bool = False,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        description: str | None = None,
        artifact_location: str | None = None,
    ) -> None:
        super().__init__(all_ranks=all_ranks)
        self._tracking_uri = tracking_uri
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._given_run_id = run_id
        self._run_tags = dict(tags or {})
        if description is not None:
            self._run_tags["mlflow.note.content"] = description
        self._artifact_location = artifact_location
        self._entities: Any = None
        self._metrics: list[Any] = []
        self._tags: dict[str, str] = {}

    def start(self, run: RunInfo) -> None:
        """Open the run, or go on with the one of the checkpoint."""
        mlflow = self._import("mlflow")
        self._entities = self._import("mlflow.entities")
        self._metrics, self._tags = [], {}
        going_on = self._resumed(run) or self._given_run_id
        client = mlflow.MlflowClient(tracking_uri=self._uri(mlflow, run))
        if not going_on or not self._is_there(mlflow, client, going_on):
            going_on = self._new_run(client, run)
        self._run_id = going_on
        self._tool = client

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record parameters; one that the run has with another value becomes a tag instead."""
        client = self._opened()
        known = client.get_run(self._run_id).data.params
        params = {
            self._named(key): self._cut(key, str(value), _LONGEST_PARAM)
            for key, value in flat_config(config).items()
        }
        new = [self._entities.Param(k, v) for k, v in params.items() if k not in known]
        for first in range(0, len(new), _TAGS_PER_BATCH):
            client.log_batch(self._run_id, params=new[first : first + _TAGS_PER_BATCH])
        changed = {k: v for k, v in params.items() if k in known and known[k] != v}
        if changed:
            self._warn_once(
                "changed",
                f"the config differs from that of the run ({', '.join(changed)}), and parameters "
                "cannot change: the new values are tags named resumed/...",
            )
        self._tags |= {f"resumed/{k}"[:_LONGEST_NAME]: v for k, v in changed.items()}
        client.log_dict(self._run_id, plain_config(config), "config.json")

    def log(self, scalars: Mapping[str, Scalar], step: int, *, time: float | None = None) -> None:
        """Hold metrics and tags until the next flush, which sends them together."""
        self._opened()
        stamp = round(1000 * (clock.time() if time is None else time))
        metric, metrics, tags = self._entities.Metric, [], {}
        for key, value in scalars.items():
            if isinstance(value, str):
                tags[self._named(key)] = self._cut(key, value, _LONGEST_TAG)
            else:
                metrics.append(metric(self._named(key), as_float(value), stamp, step))
        self._metrics += metrics
        self._tags |= tags
        self._seen(step)

    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Record pictures with their step; MLflow has no place for captions. Needs Pillow."""
        client = self._opened()
        for name, image, _ in named_pictures(images, captions):
            client.log_image(self._run_id, image, key=self._named(name), step=step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table as ``tables/<name>/<step>.json``, in the layout of MLflow's own."""
        table = json.dumps({"columns": list(columns), "data": [list(row) for row in rows]})
        self._opened().log_text(self._run_id, table, f"tables/{self._named(name)}/{step}.json")

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record texts as ``text/<name>/<step>.txt``."""
        client = self._opened()
        for name, text in texts.items():
            client.log_text(self._run_id, text, f"text/{self._named(name)}/{step}.txt")

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures as ``figures/<name>/<step>.png``."""
        client = self._opened()
        for name, figure in figures.items():
            client.log_figure(self._run_id, figure, f"figures/{self._named(name)}/{step}.png")

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Copy a file or a folder to the run's artifacts, below ``name`` if there is one."""
        client = self._opened()
        copy = client.log_artifacts if os.path.isdir(path) else client.log_artifact
        copy(self._run_id, path, name or (os.path.basename(path) if os.path.isdir(path) else None))

    def flush(self) -> None:
        """Send what is held; what an error kept from being sent stays."""
        client = self._opened()
        while self._metrics or self._tags:
            tags = dict(islice(self._tags.items(), _TAGS_PER_BATCH))
            metrics = self._metrics[: _PER_BATCH - len(tags)]
            as_tags = [self._entities.RunTag(key, value) for key, value in tags.items()]
            client.log_batch(self._run_id, metrics=metrics, tags=as_tags)
            del self._metrics[: len(metrics)]
            for key in tags:
                del self._tags[key]

    def finish(self, status: Status = "success") -> None:
        """Send the rest and end the run as FINISHED, FAILED or KILLED."""
        self._end(status)
        if self._tool is None:
            return
        try:
            self.flush()
        finally:
            self._closed().set_terminated(self._run_id, status=_STATUS[status])

    def _uri(self, mlflow: Any, run: RunInfo) -> str | None:
        """Return where to log to; None leaves it to MLflow."""
        if self._tracking_uri is not None:
            return self._tracking_uri
        if mlflow.is_tracking_uri_set() or "databricks" in mlflow.get_tracking_uri():
            return None
        folder = local_folder(run, "mlflow", "name a server: MLFLOW_TRACKING_URI or tracking_uri=")
        os.makedirs(folder, exist_ok=True)
        if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("1", "true"):
            return folder
        missing = [m for m in ("sqlalchemy", "alembic") if importlib.util.find_spec(m) is None]
        if missing:
            raise ImportError(
                f"MLflow keeps runs in a database, which needs {' and '.join(missing)}: pip "
                f"install {' '.join(missing)}. Or set MLFLOW_TRACKING_URI to a server, or "
                "MLFLOW_ALLOW_FILE_STORE=true to keep them in files"
            )
        return f"sqlite:///{folder.replace(os.sep, '/')}/mlflow.db"

    def _is_there(self, mlflow: Any, client: Any, run_id: str) -> bool:
        """Open a run again; False where there is none of this id: on another machine, say."""
        try:
            client.update_run(run_id, status="RUNNING")
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST" or run_id == self._given_run_id:
                raise
            self._warn_once("gone", f"{client.tracking_uri} has no run {run_id}: a new one is made")
            return False
        return True

    def _new_run(self, client: Any, run: RunInfo) -> str:
        """Make a run, and its experiment where it is the first, and return its id."""
        name = self._experiment_name or run.name
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            identifier = client.create_experiment(name, self._artifacts(client, run))
        else:
            identifier = experiment.experiment_id
        made = client.create_run(
            identifier, run_name=self._run_name or name_of_run(run), tags=self._run_tags
        )
        return str(made.info.run_id)

    def _artifacts(self, client: Any, run: RunInfo) -> str | None:
        """Keep files beside a local database, which would put them into the working directory."""
        if self._artifact_location is None and not is_remote(run.logging_dir):
            uri = str(client.tracking_uri)
            if uri.startswith("sqlite:"):
                return os.path.join(local_folder(run, "mlflow", ""), "artifacts")
        return self._artifact_location

    def _named(self, name: str) -> str:
        """Return a name in the characters that MLflow allows, without odd path parts."""
        plain = re.sub(r"[^/\w.\- :]", "_", name).strip("/")
        plain = posixpath.normpath(plain.replace("..", "__"))[:_LONGEST_NAME]
        if plain != name:
            self._warn_once("name", f"{name!r} is recorded as {plain!r}, which MLflow allows")
        return plain

    def _cut(self, key: str, value: str, longest: int) -> str:
        """Shorten a value that is too long."""
        if len(value) > longest:
            self._warn_once("long", f"{key!r} has {len(value)} characters; {longest} are kept")
        return value[:longest]
