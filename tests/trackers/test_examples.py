"""The examples of these trackers, as a user starts them, where torch is installed too."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(example: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """Run one in this process, which has imported torch and the tools already."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    monkeypatch.setattr(sys, "argv", [example, "--project_dir", str(folder)])
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    return str(capsys.readouterr().out)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    out = run("trackers_mlflow.py", tmp_path, monkeypatch, capsys)
    assert "58 losses" in out
    assert "status FINISHED" in out
    assert list(tmp_path.rglob("artifacts/softmax/model*.safetensors"))


def test_local_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    pytest.importorskip("dvclive", reason="dvclive is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    out = run("trackers_local_first.py", tmp_path, monkeypatch, capsys)
    assert "at step 58" in out
    assert "pictures: 8" in out
    (one,) = SQLiteStorage.get_runs("digits")
    assert sum("train/loss" in row for row in SQLiteStorage.get_logs("digits", run=one)) == 58


def test_hosted_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for tool in ("comet_ml", "swanlab", "clearml"):
        pytest.importorskip(tool, reason=f"{tool} is not installed")
    out = run("trackers_hosted_offline.py", tmp_path, monkeypatch, capsys)
    assert "comet upload" in out
    assert "swanlab sync" in out
    assert "import_offline_session" in out
