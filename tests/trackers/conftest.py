"""Runs to write, away from the user's accounts and folders, and each tool's own way to read."""

from __future__ import annotations

import itertools
import json
import os
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loggers import RunInfo, TrackerHub, configured_tracker

History = dict[str, list[tuple[int, Any]]]
"""By metric, in the order of logging: step and value."""

MODULES = {
    "mlflow": "mlflow",
    "trackio": "trackio",
    "comet": "comet_ml",
    "swanlab": "swanlab",
    "clearml": "clearml",
    "dvclive": "dvclive",
}
OPTIONS: dict[str, dict[str, Any]] = {  # no measuring of the machine that runs the tests
    "trackio": {"auto_log_cpu": False, "auto_log_gpu": False},
    "comet": {
        "experiment_config": {
            "log_code": False,
            "log_env_details": False,
            "log_git_metadata": False,
            "log_git_patch": False,
        }
    },
    "swanlab": {
        "settings": {
            "probe": {"monitor": False, "hardware": False, "requirements": False, "git": False},
            "terminal": {"proxy_type": "none"},
        }
    },
}
_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def no_accounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tools find no account and no home; some read the variables when they are imported."""
    place = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("MLFLOW_", "TRACKIO_", "COMET_", "SWANLAB_", "CLEARML_", "DVC")):
                patch.delenv(name)
        patch.setenv("HOME", str(place))
        patch.setenv("TRACKIO_DIR", str(place.parent / "trackio"))
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
        patch.setenv("COMET_ERROR_TRACKING_ENABLE", "false")
        patch.setenv("DVC_NO_ANALYTICS", "true")
        yield


@pytest.fixture(autouse=True)
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, into which nothing is to be written."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture(params=MODULES)
def name(request: pytest.FixtureRequest) -> str:
    """The name of each tracker whose tool is installed."""
    return needs(request.param)


def needs(name: str) -> str:
    """Skip where the tool is not installed."""
    pytest.importorskip(MODULES[name], reason=f"{name} is not installed")
    return name


@pytest.fixture
def run_info(tmp_path: Path) -> Callable[..., RunInfo]:
    """Make runs of one project, which no other test has."""
    project = f"digits{next(_numbers)}"

    def make(resumed_step: int | None = None, **kwargs: Any) -> RunInfo:
        folder = str(tmp_path / "runs")
        fields = {"name": project, "logging_dir": folder, "run_id": "a1", **kwargs}
        return RunInfo(**fields, resumed_step=resumed_step)

    return make


@pytest.fixture
def hub() -> Callable[..., TrackerHub]:
    """Make a strict hub of one tracker."""

    def make(name: str, run: RunInfo, **options: Any) -> TrackerHub:
        chosen = configured_tracker(name, **{**OPTIONS.get(name, {}), **options})
        return TrackerHub([chosen], run=run, strict=True)

    return make


@pytest.fixture
def read() -> Callable[[str, RunInfo], Any]:
    """Read a run back: ``history``, ``config`` and ``status``, with the tool's own reader."""
    return lambda name, run: SimpleNamespace(**_READERS[name](run))


def _mlflow(run: RunInfo) -> dict[str, Any]:
    import mlflow

    place = Path(run.logging_dir, "mlflow")
    database = place / "mlflow.db"
    uri = f"sqlite:///{database}" if database.exists() else str(place)
    client = mlflow.MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(run.name)
    (one,) = client.search_runs(
        [found.experiment_id], f"attributes.run_name = '{run.run_id}'", max_results=2
    )
    history = {
        key: [(m.step, m.value) for m in client.get_metric_history(one.info.run_id, key)]
        for key in one.data.metrics
    }
    texts = {key: [(-1, v)] for key, v in one.data.tags.items() if not key.startswith("mlflow.")}
    return {
        "history": {**history, **texts},
        "config": one.data.params,
        "status": one.info.status,
        "client": client,
        "id": one.info.run_id,
    }


def _trackio(run: RunInfo) -> dict[str, Any]:
    from trackio.sqlite_storage import SQLiteStorage as Storage

    history: History = defaultdict(list)
    for row in Storage.get_logs(run.name, run=run.run_id):
        for key, value in row.items():
            if key not in ("step", "timestamp"):
                history[key].append((row["step"], value))
    alerts = [alert["title"] for alert in Storage.get_alerts(run.name, run_name=run.run_id)]
    return {
        "history": history,
        "config": Storage.get_run_config(run.name, run.run_id),
        "status": alerts[-1] if alerts else "no alert",
    }


def _comet(run: RunInfo) -> dict[str, Any]:
    history: History = defaultdict(list)
    config, others, uploads = {}, {}, []
    archives = sorted(Path(run.logging_dir, "comet").glob("*.zip"), key=os.path.getmtime)
    for archive in archives:
        with zipfile.ZipFile(archive) as opened:
            for line in opened.read("messages.json").splitlines():
                message = json.loads(line)
                payload = message["payload"]
                if message["type"] == "metric_msg":
                    metric = payload["metric"]
                    history[metric["metricName"]].append((metric["step"], metric["metricValue"]))
                elif message["type"] == "parameter_msg" and "param" in payload:
                    config[payload["param"]["paramName"]] = payload["param"]["paramValue"]
                elif message["type"] == "log_other":
                    others[payload["key"]] = payload["value"]
                elif message["type"] == "file_upload":
                    data = opened.read(payload["file_path"])
                    uploads.append((payload, data))
                    if payload["upload_type"] == "text-sample":
                        step = payload["additional_params"]["step"]
                        history[payload["metadata"]["name"]].append((step, data.decode()))
    return {
        "history": history,
        "config": config,
        "status": others.get("status"),
        "others": others,
        "uploads": uploads,
        "archives": archives,
    }


def _swanlab(run: RunInfo) -> dict[str, Any]:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    history: History = defaultdict(list)
    config, status, media = {}, None, []
    folders = sorted(Path(run.logging_dir, "swanlab").glob(f"run-*{run.run_id}"))
    for folder in folders:
        config |= yaml.safe_load((folder / "files" / "config.yaml").read_text()) or {}
        reader = DataStoreReader()
        reader.open(next(folder.glob("*.swanlab")))
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "scalar":
                scalar = record.scalar
                history[scalar.key].append((scalar.step, scalar.value.number))
            elif kind == "media":
                media += [(record.media.key, item.filename) for item in record.media.value.items]
                for file in folder.glob(f"media/text/{record.media.value.items[0].filename}"):
                    history[record.media.key].append((record.media.step, file.read_text()))
            elif kind == "finish":
                status = RunState.Name(record.finish.state)
        reader.close()
    plain = {key: entry["value"] for key, entry in config.items()}
    return {
        "history": history,
        "config": plain,
        "status": status,
        "folders": folders,
        "media": media,
    }


def _clearml(run: RunInfo) -> dict[str, Any]:
    history: History = defaultdict(list)
    events = []
    (task_file,) = Path(run.logging_dir, "clearml").glob("offline/*/task.json")
    task = json.loads(task_file.read_text())
    for line in task_file.with_name("metrics.jsonl").read_text().splitlines():
        events += json.loads(line)
    for event in events:
        if event["type"] == "training_stats_scalar":
            same = event["metric"] == event["variant"]
            key = event["metric"] if same else f"{event['metric']}/{event['variant']}"
            history[key].append((event["iter"], event["value"]))
    lines = task_file.with_name("log.jsonl").read_text().splitlines()
    console = "\n".join(entry["msg"] for line in lines for entry in json.loads(line))
    sections = task.get("hyperparams", {})
    config = {
        (key if section == "General" else f"{section}/{key}"): entry["value"]
        for section, entries in sections.items()
        for key, entry in entries.items()
    }
    return {
        "history": history,
        "config": config,
        "status": sections["properties"]["status"]["value"],
        "events": events,
        "console": console,
        "task": task,
    }


def _dvclive(run: RunInfo) -> dict[str, Any]:
    from dvclive.serialize import load_yaml
    from dvclive.utils import parse_metrics

    folder = Path(run.logging_dir, "dvclive", run.run_id)
    files = {"plots_dir": str(folder / "plots"), "metrics_file": str(folder / "metrics.json")}
    plots, latest = parse_metrics(SimpleNamespace(**files))
    history = {
        Path(path).relative_to(folder / "plots" / "metrics").with_suffix("").as_posix(): [
            (int(row["step"]), row[Path(path).stem]) for row in rows
        ]
        for path, rows in plots.items()
    }
    return {
        "history": history,
        "config": load_yaml(folder / "params.yaml") if (folder / "params.yaml").exists() else {},
        "status": latest["status"],
        "folder": folder,
    }


_READERS = {
    "mlflow": _mlflow,
    "trackio": _trackio,
    "comet": _comet,
    "swanlab": _swanlab,
    "clearml": _clearml,
    "dvclive": _dvclive,
}
