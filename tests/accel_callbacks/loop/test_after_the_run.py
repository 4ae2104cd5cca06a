"""What follows a run: an evaluation, and the same script started again after its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import EMA, Checkpoint, ProgressBar, Timer
from loggers import read_csv, read_jsonl


def script(folder: Path, epochs: int = 2, result: float = 0.75) -> Accelerator:
    """A script that trains, and evaluates after its run."""
    accel = Accelerator(
        cpu=True,
        project_dir=folder,
        log_with=["jsonl", "csv", "tensorboard"],
        callbacks=[Checkpoint()],
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    with accel.run("digits", {"lr": 0.1, "limit": float("nan")}) as run:
        for _ in run.epochs(epochs):
            for batch in data:
                loss = model(batch).mean()
                accel.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                accel.log({"loss": loss})
    with accel.evaluate(stage="test"):
        accel.log({"test/accuracy": result, "test/worst": float("nan"), "test/name": "a\nb"})
    accel.end_training()
    return accel


def values(folder: Path) -> list[tuple[int, str]]:
    """All scalars and texts in the event files, each as step and tag."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    files = sorted(map(str, (folder / "tensorboard").iterdir()))
    events = [event for path in files for event in loader.EventFileLoader(path).Load()]
    return [(event.step, value.tag) for event in events for value in event.summary.value]


def test_a_result_after_the_run_is_a_row_of_the_run(tmp_path):
    script(tmp_path)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 5
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["values"]["test/accuracy"] == 0.75
    assert read_csv(tmp_path / "metrics.csv")[-1]["values"]["test/accuracy"] == 0.75


def test_a_finished_script_that_is_started_again_logs_nothing_twice(tmp_path):
    script(tmp_path)
    before = repr(read_jsonl(tmp_path / "metrics.jsonl")), (tmp_path / "metrics.csv").read_text()
    events = values(tmp_path)
    assert len(set(events)) == 9
    for _ in range(2):
        script(tmp_path)
    assert before == (
        repr(read_jsonl(tmp_path / "metrics.jsonl")),
        (tmp_path / "metrics.csv").read_text(),
    )
    assert set(values(tmp_path)) == set(events)


def test_a_finished_script_that_finds_another_result_logs_that_too(tmp_path):
    script(tmp_path)
    script(tmp_path, result=0.5)
    rows = [row["values"] for row in read_jsonl(tmp_path / "metrics.jsonl")[-2:]]
    assert [row["test/accuracy"] for row in rows] == [0.75, 0.5]
    assert list(rows[1]) == ["test/accuracy"]
    assert read_csv(tmp_path / "metrics.csv")[-1]["values"] == {"test/accuracy": 0.5}
    assert values(tmp_path).count((4, "test/accuracy")) == 2


def test_a_finished_script_that_trains_for_longer_has_each_row_once(tmp_path):
    script(tmp_path)
    script(tmp_path, epochs=3)
    steps = [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 4, 5, 6, 6]


@pytest.mark.parametrize("stage", ["validation", "test"])
def test_an_evaluation_after_the_run_fires_its_hooks_and_no_setup(training, stage):
    t = training()
    with t.accel.run("demo") as run:
        for _ in run.epochs(1):
            list(t.train)
    t.recorder.take()
    for _ in range(2):
        with t.accel.evaluate(t.model, stage=stage):
            list(t.val)
    t.accel.end_training()
    seen = t.recorder.take()
    assert seen[0] == f"{stage}_start"
    assert seen[-1] == f"{stage}_end"
    assert not [hook for hook in seen if not hook.startswith(stage)]
    with t.accel.run("another") as run:  # and the next run begins as ever
        assert t.recorder.take() == ["setup fit", "fit_start"]
    assert t.recorder.take() == ["fit_end", "teardown fit"]


def test_a_pass_in_eval_mode_after_the_run_ends_its_hooks_too(training):
    t = training()
    with t.accel.run("demo") as run:
        for _ in run.epochs(1):
            list(t.train)
    t.recorder.take()
    with torch.no_grad():
        list(t.val)
    t.accel.end_training()
    assert t.recorder.take()[-2:] == ["validation_epoch_end", "validation_end"]


def test_built_in_callbacks_serve_an_evaluation_after_the_run(training, capsys):
    ema, timer = EMA(0.5), Timer()
    t = training(ema, timer, ProgressBar())
    with t.accel.run("demo") as run:
        for _ in run.epochs(1):
            for batch in t.train:
                t.step(batch)
    weight = [p.clone() for p in t.model.parameters()]
    capsys.readouterr()
    with t.accel.evaluate(t.model, stage="test"):
        list(t.val)
        averaged = [p.clone() for p in t.model.parameters()]
    assert not all(map(torch.equal, weight, averaged))
    assert all(map(torch.equal, weight, t.model.parameters()))
    assert timer.time_elapsed("test") > 0
    assert "test" in capsys.readouterr().err


class Ids(Callback):
    """Keeps the id of the run as each hook sees it."""

    def __init__(self):
        self.seen = []
        for hook in ("setup", "on_fit_start", "on_train_start", "on_fit_end", "teardown"):
            setattr(self, hook, lambda run, *args: self.seen.append(run.run_id))


def test_the_run_id_is_the_same_from_setup_to_teardown_of_a_resumed_run(training, tmp_path):
    seen = []
    for epochs in (1, 2):
        ids = Ids()
        t = training(Checkpoint(tmp_path), ids)
        with t.accel.run("demo") as run:
            for _ in run.epochs(epochs):
                list(t.train)
        assert len(ids.seen) == 5
        seen += ids.seen
    assert len(set(seen)) == 1


def test_what_setup_logs_in_a_resumed_run_goes_to_its_own_record(tmp_path):
    class Logs(Callback):
        def setup(self, run, model, stage):
            run.accelerator.log({"parameters": 2}, step=0)

    for epochs in (1, 2):
        accel = Accelerator(
            cpu=True, project_dir=tmp_path, log_with="jsonl", callbacks=[Checkpoint(), Logs()]
        )
        accel.prepare(torch.nn.Linear(1, 1))
        with accel.run("demo") as run:
            for epoch in run.epochs(epochs):
                accel.log({"epoch": epoch}, step=epoch)
        accel.end_training()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["values"].get("epoch") for row in rows if "epoch" in row["values"]] == [0, 1]
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert len({one["run_id"] for one in records if one["type"] == "run"}) == 1


def test_people_read_epochs_counted_from_one(training, tmp_path, capsys):
    for epochs in (1, 1, 2):
        t = training(Checkpoint(tmp_path), ProgressBar())
        with t.accel.run("demo") as run:
            for epoch in run.epochs(epochs):
                list(t.train)
                assert run.current_epoch == epoch  # programs count from 0
    text = capsys.readouterr().err
    assert "step-00000000 (step 0, epoch 1)" in text
    assert "nothing left to do: 1 epoch is done" in text
    assert "epoch 1/1" in text
    assert "epoch 2/2" in text
    assert "epoch 0" not in text
