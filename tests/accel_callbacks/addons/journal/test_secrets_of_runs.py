"""Secrets of a run are in none of its files; those with a config are for its user alone."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.journal import Journal
from loggers import JSONLTracker, RunInfo, TensorBoardTracker
from loggers.redaction import HIDDEN

SIGNED = "https://store/data.tar?sv=1&sig=hush&se=2"
WEBHOOK = "https://hooks.slack.com/services/T/B/hush"
CONFIG: dict[str, Any] = {
    "lr": 0.1,
    "data": SIGNED,
    "alerts": {"url": WEBHOOK, "headers": ["Authorization: Bearer hush"]},
    "store": "s3://me:hush@bucket/runs",
    "wandb": {"api_key": "hush"},
}


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "checkpoints" not in str(path))


def modes(folder: Path) -> dict[str, int]:
    return {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in files_of(folder)}


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_no_file_of_a_run_has_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usual_umask: None
) -> None:
    pytest.importorskip("tensorboard")
    words = [
        "train.py",
        "--data",
        SIGNED,
        "--alerts",
        WEBHOOK,
        "--header=Authorization: Bearer hush",
    ]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.setenv("ACCEL_EXTRA", SIGNED)
    accel = Accelerator(cpu=True, project_dir=tmp_path, log_with=["jsonl", "tensorboard", "csv"])
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accel.prepare(torch.optim.SGD([weight], lr=0.5))

    def train() -> None:
        with accel.run("demo", config=CONFIG) as run:
            accel.backward((weight * 3).sum())
            optimizer.step()
            accel.log({"loss": 1.0}, step=1)
            run.note("remark", text=f"reading {SIGNED}")
            raise RuntimeError(f"403 for {SIGNED}")

    with pytest.raises(RuntimeError):
        train()
    assert [str(path) for path in files_of(tmp_path) if b"hush" in path.read_bytes()] == []
    journal = Journal.read(tmp_path)
    start = journal.attempts[0].start
    shown = SIGNED.replace("hush", HIDDEN)
    assert start["argv"][:3] == ["train.py", "--data", shown]
    assert start["environment"]["ACCEL_EXTRA"] == shown
    assert start["config"]["data"] == shown
    assert start["config"]["lr"] == 0.1
    assert journal.marks[-1]["error"] == f"RuntimeError: 403 for {shown}"
    told = modes(tmp_path)
    assert told[".jsonl"] == told[".loggers"] == 0o600
    assert told[".rows"] == told[".csv"] == 0o644, "they hold numbers"


@pytest.mark.parametrize("kind", [JSONLTracker, TensorBoardTracker])
def test_a_tracker_of_its_own_leaves_secrets_out(
    kind: Any, tmp_path: Path, usual_umask: None
) -> None:
    pytest.importorskip("tensorboard")
    for resumed in (None, 1):
        tracker = kind()
        tracker.start(RunInfo("digits", str(tmp_path), "a1", resumed_step=resumed))
        tracker.log_config(CONFIG)
        tracker.log({"loss": 0.5}, step=1)
        tracker.log({"loss": 0.5}, step=2 + (resumed or 0))
        tracker.finish("success")
    assert all(b"hush" not in path.read_bytes() for path in files_of(tmp_path))
    assert set(modes(tmp_path).values()) == {0o600}, "also after a file was rewritten"


def test_a_file_that_is_rewritten_keeps_its_mode(tmp_path: Path, usual_umask: None) -> None:
    for resumed in (None, 1):
        tracker = JSONLTracker()
        tracker.start(RunInfo("digits", str(tmp_path), "a1", resumed_step=resumed))
        for step in (1, 2, 3):
            tracker.log({"loss": 0.5}, step=step)
        tracker.finish("success")
        (file,) = files_of(tmp_path)
        if resumed is None:
            file.chmod(0o640)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
