"""Training as Windows and macOS see it, as far as Linux shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ACCEL = ["-m", "accel_callbacks.cli"]

Run = Callable[..., str]


# The other system of each is slow: between them both are tried.
@pytest.mark.parametrize(
    "on_other_system", [pytest.param("win32", marks=pytest.mark.slow), "darwin"], indirect=True
)
@pytest.mark.distributed
def test_accel_test_passes_on_two_processes(on_other_system: Run) -> None:
    found = on_other_system(*ACCEL, "test", "--cpu", "--num_processes", "2")
    assert "2 processes" in found


@pytest.mark.parametrize(
    "on_other_system", ["win32", pytest.param("darwin", marks=pytest.mark.slow)], indirect=True
)
def test_digits_train_resume_and_log(on_other_system: Run, tmp_path: Path) -> None:
    words = [str(ROOT / "examples" / "digits.py"), "--project_dir", "runs", "--cpu"]
    on_other_system(*ACCEL, "launch", *words, "--epochs", "1")
    on_other_system(*words, "--epochs", "2")
    rows = (tmp_path / "work" / "runs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(row)["step"] for row in rows if "train/loss" in row]
    assert steps == sorted(set(steps)), "the second run goes on where the first ended"
    assert list((tmp_path / "work" / "runs" / "checkpoints").glob("step-*/manifest.json"))
