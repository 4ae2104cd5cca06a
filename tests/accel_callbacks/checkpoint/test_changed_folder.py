"""A script that changes its folder: what it has named by a relative path stays where it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import (
    Accelerator,
    ProfileKwargs,
    ProjectConfiguration,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel_callbacks.callbacks import Checkpoint, Profiler
from checkpoint_io import CheckpointFolder
from loggers import RunInfo


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folder in which a script starts, and the one to which it goes."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path, tmp_path / "data"


def train(accel: Accelerator, elsewhere: Path, resume: bool = True) -> int:
    """Train, change the folder in the first step, and return the step at the start."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accel.prepare(model, optimizer, DataLoader(torch.ones(4, 1)))
    with accel.run("changed", resume=resume) as run:
        start = run.global_step
        for batch in data:
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            os.chdir(elsewhere)
            accel.log({"loss": 1.0})
        accel.save_state("mine")
    accel.end_training()
    return start


@pytest.mark.parametrize("when", ["before the run", "in the run"])
def test_a_run_writes_and_resumes_where_it_was_told_to(places, when):
    start, elsewhere = places
    for expected in (0, 4):
        os.chdir(start)
        profiler = Profiler("traces", wait=0, warmup=0, active=1, activities=["cpu"])
        own = Checkpoint("own", every_n_steps=2)
        config = ProjectConfiguration("runs/x", logging_dir="logs")
        os.chdir(elsewhere if when == "before the run" else start)
        accel = Accelerator(
            cpu=True,
            callbacks=[own, Checkpoint(every_n_steps=2), profiler],
            log_with="jsonl",
            project_config=config,
        )
        os.chdir(elsewhere if when == "before the run" else start)
        assert train(accel, elsewhere) == expected
    made = {path.name for path in start.iterdir()}
    assert made == {"data", "logs", "own", "runs", "traces"}
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]  # named after the change
    assert CheckpointFolder("../own").latest().name == "step-00000008"
    assert accel.project_dir == str(start / "runs/x")
    assert accel.logging_dir == str(start / "logs")


def test_a_project_of_no_folder_stays_in_the_one_of_the_start(places):
    start, elsewhere = places
    accel = Accelerator(cpu=True, callbacks=[Checkpoint(every_n_steps=2)])
    train(accel, elsewhere)
    assert (start / "checkpoints").is_dir()


def test_trackers_alone_and_their_artifacts(places):
    start, elsewhere = places
    accel = Accelerator(cpu=True, log_with="jsonl", project_dir="runs")
    accel.init_trackers("changed")
    Path("figure.txt").touch()
    accel.log_artifact("figure.txt")
    os.chdir(elsewhere)
    accel.end_training()
    assert f'"{start / "figure.txt"}"' in Path("../runs/metrics.jsonl").read_text()
    assert RunInfo("a", "runs", "b").logging_dir == str(elsewhere / "runs")
    assert RunInfo("a", "memory://runs", "b").logging_dir == "memory://runs"


def test_a_trace_of_a_block(places):
    start, elsewhere = places
    accel = Accelerator(cpu=True)
    with accel.profile(ProfileKwargs(activities=["cpu"], output_trace_dir="traces")):
        os.chdir(elsewhere)
    assert [path.name for path in (start / "traces").iterdir()] == ["profile_0.json"]


def test_weights_on_disk(places):
    _, elsewhere = places
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    torch.save(plain.state_dict(), "pytorch_model.bin")
    Accelerator(cpu=True).save_model(plain, "weights")
    models = []
    for checkpoint, folder in (("weights", None), ("pytorch_model.bin", "offload")):
        with init_empty_weights():
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        options = {"device_map": {"0": "cpu", "1": "disk"}, "offload_folder": folder}
        models.append(load_checkpoint_and_dispatch(model, checkpoint, **options))
    os.chdir(elsewhere)
    for model in models:
        assert torch.equal(model(torch.ones(1, 2)), plain(torch.ones(1, 2)))
