from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_io import (
    CheckpointFolder,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    keep_last,
    read_manifest,
    save,
)


def fill(folder: CheckpointFolder, *steps: int, run_id: str = "r1") -> None:
    for step in steps:
        state = {"step": step, "w": torch.full((5,), float(step))}
        folder.save(step, state, metadata={"run_id": run_id})


def names(folder: CheckpointFolder) -> list[str]:
    return [info.name for info in folder.list()]


def test_newest_is_by_generation_not_by_step_or_clock(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 300, 200, 100)
    assert names(folder) == ["step-00000300", "step-00000200", "step-00000100"]
    latest = folder.latest()
    assert latest is not None
    assert latest.path == folder.path(100)
    fill(folder, 300)  # overwritten, so the newest again
    assert names(folder)[-1] == "step-00000300"
    assert folder.next_generation() == 5
    assert read_manifest(folder.path(300)).metadata["step"] == 300


def test_empty_and_absent_folders(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "absent")
    assert folder.list() == []
    assert folder.latest() is None
    assert folder.next_generation() == 1
    with pytest.raises(CheckpointNotFoundError, match="check the path"):
        folder.load_latest()
    with pytest.raises(ValueError, match="step"):
        folder.path(-1)
    with pytest.raises(ValueError, match="plain folder name"):
        folder.save(1, {}, name="../x")


def test_relative_paths_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = CheckpointFolder("runs/")
    fill(folder, 1)
    assert folder.path(1) == "runs/step-00000001"
    assert folder.load_latest().state["step"] == 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("memory://", "memory://step-00000001"),
        ("memory://a/", "memory://a/step-00000001"),
        ("/", "/step-00000001"),
        (Path("runs"), "runs/step-00000001"),
    ],
)
def test_paths_join(url: Any, expected: str) -> None:
    assert CheckpointFolder(url).path(1) == expected


def test_broken_ones_are_skipped_and_say_why(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3, 4)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    os.truncate(tmp_path / "step-00000003" / "manifest.json", 100)
    next((tmp_path / "step-00000002").glob("tensors-*")).unlink()
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "log.txt").write_text("foreign")
    with pytest.warns(CheckpointWarning) as caught:
        assert names(folder) == ["step-00000001"]
    text = "\n".join(str(w.message) for w in caught)
    assert "never finished" in text
    assert "not valid JSON" in text
    assert "missing" in text
    assert "best" not in text


def test_load_latest_falls_back_when_checksums_fail(tmp_path: Path, flip_bit: Any) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2)
    flip_bit(next((tmp_path / "step-00000002").glob("tensors-*")), 4100)
    assert names(folder)[-1] == "step-00000002"
    with pytest.warns(CheckpointWarning, match="passed over .*step-00000002"):
        assert folder.load_latest().state["step"] == 1
    flip_bit(next((tmp_path / "step-00000001").glob("objects-*")), 50)
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(CorruptCheckpointError, match="all are damaged"),
    ):
        folder.load_latest()


def test_prune_touches_only_its_own_run(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, run_id="other")
    fill(folder, 3, 4, 5)
    save(tmp_path / "unnamed", {"x": 1})
    (tmp_path / "step-00000003" / "notes.txt").write_text("mine")
    removed = folder.prune(keep_last(1), run_id="r1")
    assert removed == [folder.path(3), folder.path(4)]
    left = ["step-00000001", "step-00000002", "step-00000005", "unnamed"]
    assert sorted(names(folder)) == left
    assert [p.name for p in (tmp_path / "step-00000003").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "step-00000004").exists()


def test_prune_keeps_what_is_asked_and_always_the_newest_valid(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3, 4)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        folder.prune({folder.path(1) + "/"}, run_id="r1")
        assert names(folder) == ["step-00000001", "step-00000003"]
        folder.prune(folder.path(1), run_id="r1")
        folder.prune([], run_id="nobody")
        assert names(folder) == ["step-00000001", "step-00000003"]
        folder.prune(set(), run_id="r1")
    assert names(folder) == ["step-00000003"]


def test_prune_removes_unfinished_saves_of_its_run_only(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3, 5)
    fill(folder, 4, run_id="other")
    for step in (1, 2, 3, 4):
        (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    torn = next((tmp_path / "step-00000001").glob("objects-*"))
    os.truncate(torn, 3)  # cut short; the tensor file of the same save still says whose it is
    with pytest.warns(CheckpointWarning):
        folder.prune([folder.path(2)], run_id="r1", in_progress=[folder.path(3)])
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-00000002", "step-00000003", "step-00000004", "step-00000005"]


def test_links_are_no_checkpoints(tmp_path: Path) -> None:
    other = CheckpointFolder(tmp_path / "other")
    fill(other, 1)
    folder = CheckpointFolder(tmp_path / "runs")
    fill(folder, 2)
    (tmp_path / "runs" / "step-00000001").symlink_to(tmp_path / "other" / "step-00000001")
    assert names(folder) == ["step-00000002"]
    folder.prune(keep_last(1), run_id="r1")
    assert names(other) == ["step-00000001"]
