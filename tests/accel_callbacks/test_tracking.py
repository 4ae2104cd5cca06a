"""Trackers of an Accelerator: opened late, never in the way, closed with the right status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint
from loggers import Tracker


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == kind]


def metrics(folder: Path) -> list[tuple[int, dict]]:
    return [(record["step"], record["values"]) for record in records(folder, "metrics")]


def statuses(folder: Path) -> list[str]:
    return [record["status"] for record in records(folder, "finish")]


def jsonl(folder: Path, **options) -> Accelerator:
    return Accelerator(cpu=True, log_with="jsonl", project_dir=folder, **options)


class Kept(Tracker):
    """Keeps what it is given; fails in the methods that it is told to."""

    def __init__(self, name: str = "kept", fails: tuple[str, ...] = ()) -> None:
        self.name = name
        self.fails = fails
        self.rows: list[tuple[int, dict]] = []
        self.status: str | None = None
        self.config: dict = {}

    def _act(self, method: str) -> None:
        if method in self.fails:
            raise ConnectionError(f"{method} has no network")

    def start(self, run):
        self._act("start")

    def log_config(self, config):
        self._act("log_config")
        self.config = dict(config)

    def log(self, scalars, step):
        self._act("log")
        self.rows.append((step, dict(scalars)))

    def flush(self):
        self._act("flush")

    def finish(self, status="success"):
        self._act("finish")
        self.status = status


def test_what_is_logged_is_read_back(tmp_path):
    accel = jsonl(tmp_path)
    with accel.run("digits", config={"lr": 0.1, "sizes": [1, 2]}):
        accel.log({"loss": torch.tensor(0.5, requires_grad=True), "nested": {"a": 1}})
        accel.log({"loss": 0.25, "note": "hi"}, step=7)
    assert metrics(tmp_path) == [
        (0, {"loss": 0.5, "nested/a": 1}),
        (7, {"loss": 0.25, "note": "hi"}),
    ]
    assert records(tmp_path, "config")[0]["config"] == {"lr": 0.1, "sizes": [1, 2]}
    assert records(tmp_path, "run")[0]["name"] == "digits"
    assert records(tmp_path, "run")[0]["run_id"] == accel.current_run.run_id
    assert statuses(tmp_path) == ["success"]


def test_the_default_step_is_that_of_the_optimizer(tmp_path):
    accel = jsonl(tmp_path, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 1))
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    for index, batch in enumerate(loader):
        with accel.accumulate(model):
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        accel.log({"index": index})
    accel.end_training()
    assert [(step, row["index"]) for step, row in metrics(tmp_path)] == [
        (0, 0),
        (1, 1),
        (1, 2),
        (2, 3),
    ]


def test_a_value_changed_in_place_after_it_was_logged_is_logged_as_it_was(tmp_path):
    accel = jsonl(tmp_path)
    total = torch.zeros(())
    for _ in range(3):
        total += 1
        accel.log({"total": total})
    assert accel.current_run.callback_metrics["total"] == 3.0
    total += 1
    assert accel.current_run.callback_metrics["total"] == 3.0
    accel.end_training()
    assert [row["total"] for _, row in metrics(tmp_path)] == [1.0, 2.0, 3.0]


def test_trackers_open_at_the_first_log_and_not_before(tmp_path):
    accel = jsonl(tmp_path)
    assert accel.trackers == []
    assert not (tmp_path / "metrics.jsonl").exists()
    with pytest.raises(RuntimeError, match=r"accel\.run"):
        accel.get_tracker("jsonl")
    accel.log({"a": 1})
    assert [tracker.name for tracker in accel.trackers] == ["jsonl"]
    assert accel.get_tracker("jsonl") is accel.trackers[0]
    accel.end_training()
    assert accel.trackers == []


def test_init_trackers_names_the_run_and_keeps_its_config(tmp_path):
    accel = jsonl(tmp_path)
    accel.init_trackers("digits", {"lr": 0.1})
    accel.log({"a": 1})
    accel.end_training()
    assert records(tmp_path, "run")[0]["name"] == "digits"
    assert records(tmp_path, "config")[0]["config"] == {"lr": 0.1}
    assert statuses(tmp_path) == ["success"]


def test_an_unknown_tracker_is_refused(tmp_path):
    accel = jsonl(tmp_path)
    accel.init_trackers("digits")
    with pytest.raises(ValueError, match="configured: jsonl"):
        accel.get_tracker("tensorboard")
    accel.end_training()
    with pytest.raises(ValueError, match="jsnol"):
        Accelerator(cpu=True, log_with="jsnol", project_dir=tmp_path).init_trackers("x")


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "interrupted")]
)
def test_an_error_in_the_run_is_the_status_of_its_trackers(tmp_path, error, status):
    accel = jsonl(tmp_path)

    def fail() -> None:
        with accel.run("fails"):
            accel.log({"a": 1})
            raise error

    with pytest.raises(error):
        fail()
    assert statuses(tmp_path) == [status]
    assert metrics(tmp_path) == [(0, {"a": 1})]


SCRIPT = """
import sys
from accel_callbacks import Accelerator
accel = Accelerator(cpu=True, log_with="jsonl", project_dir=sys.argv[1])
accel.log({"a": 1})
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("", "success"), ("raise ValueError('x')", "failed"), ("sys.exit(0)", "success")],
    ids=["falls off the end", "raises", "exits"],
)
def test_a_plain_script_that_ends_closes_its_trackers_with_what_happened(tmp_path, end, status):
    code = SCRIPT.replace("{end}", end)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, env=environment, check=False, timeout=60, capture_output=True)
    assert statuses(tmp_path) == [status]
    assert metrics(tmp_path) == [(0, {"a": 1})]


def test_a_run_that_logs_after_its_end_goes_on_in_the_same_place(tmp_path):
    accel = jsonl(tmp_path)
    with accel.run("digits"):
        accel.log({"a": 1})
    accel.log({"test": 2})
    accel.end_training()
    assert [row for _, row in metrics(tmp_path)] == [{"a": 1}, {"test": 2}]
    assert len({record["run_id"] for record in records(tmp_path, "run")}) == 1
    assert statuses(tmp_path) == ["success", "success"]


def test_a_resumed_run_keeps_its_identity_and_its_history(tmp_path):
    def fit(epochs: int) -> Accelerator:
        saver = Checkpoint(tmp_path / "c")
        accel = jsonl(tmp_path, callbacks=[saver])
        with accel.run("digits") as run:
            for epoch in run.epochs(epochs):
                accel.log({"epoch": epoch}, step=epoch)
        return accel

    fit(2)
    fit(4)
    assert [row["epoch"] for _, row in metrics(tmp_path)] == [0, 1, 2, 3]
    runs = records(tmp_path, "run")
    assert len(runs) == 2
    assert runs[0]["run_id"] == runs[1]["run_id"]
    assert (runs[0]["resumed_step"], runs[1]["resumed_step"]) == (None, 0)


def test_two_runs_of_one_accelerator_are_two_runs_of_the_tracker(tmp_path):
    accel = jsonl(tmp_path)
    for name in ("one", "two"):
        with accel.run(name):
            accel.log({"a": 1})
    runs = records(tmp_path, "run")
    assert [run["name"] for run in runs] == ["one", "two"]
    assert runs[0]["run_id"] != runs[1]["run_id"]
    assert runs[1]["resumed_step"] is None
    assert statuses(tmp_path) == ["success", "success"]


def test_two_accelerators_log_to_their_own_places(tmp_path):
    one, two = jsonl(tmp_path / "one"), jsonl(tmp_path / "two")
    one.log({"a": 1})
    two.log({"a": 2})
    one.end_training()
    two.log({"a": 3})
    two.end_training()
    assert [row["a"] for _, row in metrics(tmp_path / "one")] == [1]
    assert [row["a"] for _, row in metrics(tmp_path / "two")] == [2, 3]


@pytest.mark.parametrize("method", ["start", "log_config", "log", "flush", "finish"])
def test_a_tracker_that_fails_ends_neither_the_run_nor_the_other_trackers(tmp_path, method):
    broken, whole = Kept("broken", (method,)), Kept("whole")
    accel = Accelerator(cpu=True, log_with=[broken, whole], project_dir=tmp_path)
    with accel.run("digits", config={"lr": 1}):
        for value in range(8):
            accel.log({"a": value})
    assert [row["a"] for _, row in whole.rows] == list(range(8))
    assert whole.status == "success"
    assert whole.config == {"lr": 1}


@pytest.mark.parametrize(
    "method",
    [
        "start",
        "log_config",
        "log",
        "flush",
        "finish",
    ],
)
def test_a_strict_tracker_that_fails_ends_the_run(tmp_path, method):
    broken, whole = Kept("broken", (method,)), Kept("whole")
    accel = Accelerator(
        cpu=True, log_with=[broken, whole], project_dir=tmp_path, strict_trackers=True
    )

    def train() -> None:
        with accel.run("digits", config={"lr": 1}):
            accel.log({"a": 1})
            accel.tracking.state_dict()

    with pytest.raises(ConnectionError, match=method):
        train()
    assert accel.trackers == []
    assert whole.status is not None


def test_a_bad_value_is_an_error_where_it_is_logged(tmp_path):
    accel = jsonl(tmp_path)
    with pytest.raises(TypeError, match="image"):
        accel.log({"image": torch.ones(2, 2)})
    assert accel.current_run.callback_metrics == {}
    accel.log({"a": 1})
    accel.end_training()
    assert metrics(tmp_path) == [(0, {"a": 1})]


def test_nothing_is_opened_where_no_tracker_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accel = Accelerator(cpu=True)
    with accel.run("quiet", config={"lr": 1}):
        accel.log({"a": 1})
    accel.end_training()
    assert list(tmp_path.iterdir()) == []


def test_logs_go_to_the_logging_dir(tmp_path):
    from accel_callbacks import ProjectConfiguration

    config = ProjectConfiguration(tmp_path / "project", logging_dir=tmp_path / "logs")
    accel = Accelerator(cpu=True, log_with="jsonl", project_config=config)
    accel.log({"a": 1})
    accel.end_training()
    assert metrics(tmp_path / "logs") == [(0, {"a": 1})]
