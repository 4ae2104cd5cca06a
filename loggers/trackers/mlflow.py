"""MLflowTracker: a database below the logging folder unless a server is configured."""

from __future__ import annotations

import importlib.util
import json
import os
import posixpath
import re
import time as clock
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from checkpoint_io.local_files import base_name, local_path
from loggers.base import RunInfo, Scalar, Status, Tracker
from loggers.trackers.tool import ItemTracker, as_float, local_folder, run_name
from loggers.values import flat_config, plain_config

__all__ = ["MLflowTracker"]

_STATUS: dict[str, str] = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

# Limits of the server, which rejects longer requests.
_PER_BATCH, _TAGS_PER_BATCH = 1000, 100
_LONGEST_NAME, _LONGEST_PARAM, _LONGEST_TAG = 250, 6000, 8000


class MLflowTracker(ItemTracker):
    """Logs to an MLflow run: scalars as metrics, the config as parameters and ``config.json``.

    Without ``tracking_uri``, MLflow's own configuration applies (``MLFLOW_TRACKING_URI``,
    ``mlflow.set_tracking_uri``); without that, the database ``<logging_dir>/mlflow/mlflow.db`` is
    used (or a folder of files there, if ``MLFLOW_ALLOW_FILE_STORE`` is true). A resume continues
    the same run; values of repeated steps are recorded twice, because MLflow cannot delete any.
    Strings become tags. An active run of the script is not used or changed.

    Args:
        all_ranks: log on every rank, one MLflow run per rank.
        tracking_uri: server, database or folder; by default as described above.
        experiment_name: default the run's ``name``.
        run_name: default the run's id.
        run_id: an MLflow run to continue, default a new one.
        tags: extra tags of the run.
        description: the run's note.
        artifact_location: location of a new experiment's files, default below ``logging_dir``
            with a local database, otherwise chosen by the server.

    Raises:
        ImportError: from `start`, if mlflow or a package that a database needs is not installed.
        ValueError: from `start`, if nothing is configured and ``logging_dir`` is a remote URL.

    Example:
        >>> tracker = MLflowTracker(experiment_name="digits", tags={"team": "vision"})
        >>> tracker.raw is None  # the MlflowClient, once started
        True
    """

    name = "mlflow"
    requires = ("mlflow",)
    install = "mlflow-skinny sqlalchemy alembic"
    log_audio, log_video = Tracker.log_audio, Tracker.log_video

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
        self._chosen_run_id = run_id
        self._run_tags = dict(tags or {})
        if description is not None:
            self._run_tags["mlflow.note.content"] = description
        self._artifact_location = artifact_location
        self._entities: Any = None
        self._metrics: list[Any] = []
        self._tags: dict[str, str] = {}

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record parameters; one whose value changed since the run was created becomes a tag."""
        client = self._target()
        known = client.get_run(self._run_id).data.params
        params = {
            self._valid_name(key): self._truncate(key, str(value), _LONGEST_PARAM)
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

    def log(
        self,
        scalars: Mapping[str, Scalar],
        step: int,
        *,
        time: float | None = None,
        synchronous: bool | None = None,
    ) -> None:
        """Buffer metrics and tags until the next flush, which sends them in one request.

        With ``synchronous=True`` they are sent now.
        """
        self._target()
        stamp = round(1000 * (clock.time() if time is None else time))
        metric, metrics, tags = self._entities.Metric, [], {}
        for key, value in scalars.items():
            if isinstance(value, str):
                tags[self._valid_name(key)] = self._truncate(key, value, _LONGEST_TAG)
            else:
                metrics.append(metric(self._valid_name(key), as_float(value), stamp, step))
        self._metrics += metrics
        self._tags |= tags
        self._note_step(step)
        if synchronous:
            self.flush()

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table as ``tables/<name>/<step>.json``, in the format of MLflow tables."""
        table = json.dumps({"columns": list(columns), "data": [list(row) for row in rows]})
        self._target().log_text(self._run_id, table, f"tables/{self._valid_name(name)}/{step}.json")

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures as ``figures/<name>/<step>.png``."""
        client = self._target()
        for name, figure in figures.items():
            client.log_figure(self._run_id, figure, f"figures/{self._valid_name(name)}/{step}.png")

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Copy a file or folder to the run's artifacts, below ``name`` if given."""
        client = self._target()
        copy = client.log_artifacts if os.path.isdir(path) else client.log_artifact
        copy(self._run_id, path, name or (base_name(path) if os.path.isdir(path) else None))

    def flush(self) -> None:
        """Send the buffer; after an error, the rest stays buffered."""
        self._send(self._target())

    def _send(self, client: Any) -> None:
        while self._metrics or self._tags:
            tags = dict(islice(self._tags.items(), _TAGS_PER_BATCH))
            metrics = self._metrics[: _PER_BATCH - len(tags)]
            as_tags = [self._entities.RunTag(key, value) for key, value in tags.items()]
            client.log_batch(self._run_id, metrics=metrics, tags=as_tags)
            del self._metrics[: len(metrics)]
            for key in tags:
                del self._tags[key]

    def _image(self, name: str, image: Any, step: int, caption: str | None = None) -> None:
        """Record an image with its step; the caption is not recorded."""
        self._target().log_image(self._run_id, image, key=self._valid_name(name), step=step)

    def _text(self, name: str, text: str, step: int) -> None:
        """Record a text as ``text/<name>/<step>.txt``."""
        self._target().log_text(self._run_id, text, f"text/{self._valid_name(name)}/{step}.txt")

    def _open(self, run: RunInfo, resumed: str | None) -> Any:
        """Create a run, or continue the one in the checkpoint."""
        mlflow = self._package
        self._entities = self._import("mlflow.entities")
        self._metrics, self._tags = [], {}
        run_id = resumed or self._chosen_run_id
        client = mlflow.MlflowClient(tracking_uri=self._uri(mlflow, run))
        if not run_id or not self._reopen(mlflow, client, run_id):
            run_id = self._create_run(client, run)
        self._run_id = run_id
        return client

    def _id(self) -> str:
        return str(self._run_id)

    def _close(self, client: Any, status: Status) -> None:
        """Send the rest and end the run as FINISHED, FAILED or KILLED."""
        try:
            self._send(client)
        finally:
            client.set_terminated(self._run_id, status=_STATUS[status])

    def _uri(self, mlflow: Any, run: RunInfo) -> str | None:
        """Return the tracking URI; None for the one that MLflow is configured with."""
        if self._tracking_uri is not None:
            return self._tracking_uri
        if mlflow.is_tracking_uri_set() or "databricks" in mlflow.get_tracking_uri():
            return None
        folder = local_folder(
            run, "mlflow", "configure a server: MLFLOW_TRACKING_URI or tracking_uri="
        )
        os.makedirs(folder, exist_ok=True)
        if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("1", "true"):
            return folder
        missing = [m for m in ("sqlalchemy", "alembic") if importlib.util.find_spec(m) is None]
        if missing:
            raise ImportError(
                f"MLflow stores runs in a database, which needs {' and '.join(missing)}: pip "
                f"install {' '.join(missing)}. Or set MLFLOW_TRACKING_URI to a server, or "
                "MLFLOW_ALLOW_FILE_STORE=true to store them in files"
            )
        return f"sqlite:///{folder.replace(os.sep, '/')}/mlflow.db"

    def _reopen(self, mlflow: Any, client: Any, run_id: str) -> bool:
        """Reopen a run; return False if it does not exist, e.g. on another machine."""
        try:
            client.update_run(run_id, status="RUNNING")
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST" or run_id == self._chosen_run_id:
                raise
            self._warn_once(
                "gone", f"{client.tracking_uri} has no run {run_id}: a new one is created"
            )
            return False
        return True

    def _create_run(self, client: Any, run: RunInfo) -> str:
        """Create a run, and its experiment if it does not exist; return the run's id."""
        name = self._experiment_name or run.name
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            identifier = client.create_experiment(name, self._artifacts(client, run))
        else:
            identifier = experiment.experiment_id
        created = client.create_run(
            identifier, run_name=self._run_name or run_name(run), tags=self._run_tags
        )
        return str(created.info.run_id)

    def _artifacts(self, client: Any, run: RunInfo) -> str | None:
        """Return the location of a new experiment's files.

        With a local database MLflow itself would use the working directory.
        """
        if self._artifact_location is None and local_path(run.logging_dir) is not None:
            uri = str(client.tracking_uri)
            if uri.startswith("sqlite:"):
                return os.path.join(local_folder(run, "mlflow", ""), "artifacts")
        return self._artifact_location

    def _valid_name(self, name: str) -> str:
        """Return a name with the characters that MLflow allows, as a normalized path."""
        plain = re.sub(r"[^/\w.\- :]", "_", name).strip("/")
        plain = posixpath.normpath(plain.replace("..", "__"))[:_LONGEST_NAME]
        if plain != name:
            self._warn_once("name", f"{name!r} is recorded as {plain!r}, which MLflow allows")
        return plain

    def _truncate(self, key: str, value: str, longest: int) -> str:
        """Truncate a value that is too long."""
        if len(value) > longest:
            self._warn_once("long", f"{key!r} has {len(value)} characters; {longest} are kept")
        return value[:longest]
