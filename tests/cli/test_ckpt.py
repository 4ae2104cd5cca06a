"""``accel ckpt``: what it prints, and what it answers to damage."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.cli.main import main
from accel_callbacks.terminal_text import age_of, size_of, to_json
from checkpoint_io import CheckpointFolder, read_manifest, save, save_model


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    found = CheckpointFolder(tmp_path / "runs")
    for step in (100, 200, 300):
        weight = torch.full((3, 4), float(step))
        state = {"model": {"w": weight, "tied": weight, "b": torch.zeros(2, dtype=torch.bfloat16)}}
        found.save(step, state, metadata={"run_id": "r1", "loss": step / 100})
    return found


def ckpt(*words: Any) -> int:
    return main(["ckpt", *map(str, words)])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_list(folder: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(Path(folder.path(200)) / "manifest.json", 10)
    (Path(folder.path(300)) / "manifest.json").unlink()
    assert ckpt("list", folder.url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "STEP", "RUN", "RUN-ID", "SCORE", "SIZE", "AGE", "STATUS"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert rows["step-00000100"].split()[1] == "100"
    assert rows["step-00000100"].endswith("complete")
    assert "broken: " in rows["step-00000200"]
    assert "unfinished: " in rows["step-00000300"]
    assert ckpt("list", folder.url, "--json") == 0
    facts = {fact["name"]: fact for fact in json.loads(capsys.readouterr().out)}
    assert facts["step-00000100"]["metadata"] == {"step": 100, "run_id": "r1", "loss": 1.0}
    assert facts["step-00000100"]["status"] == "valid"
    assert "manifest.json" in facts["step-00000200"]["reason"]


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("list", "latest", "verify", "show"):
        assert ckpt(action, tmp_path / "absent") == 1, action
        assert "absent" in capsys.readouterr().err


def test_latest(folder: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(Path(folder.path(300)) / "manifest.json", 10)
    assert ckpt("latest", folder.url) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder.path(200)}\n"
    assert "skipped step-00000300" in err


def test_show(folder: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("show", folder.path(100)) == 0
    out, err = capsys.readouterr()
    rows = [line.split(maxsplit=2) for line in out.splitlines()[1:]]
    assert rows == [
        ["model/b", "BF16", "[2]     4 B"],
        ["model/tied", "F32", "[3, 4]  -> model/w"],
        ["model/w", "F32", "[3, 4]  48 B"],
    ]
    assert "3 tensors, 52 B" in err
    assert ckpt("show", folder.path(100), "--pattern", "*/b", "--json") == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["shape"], row["bytes"]) == ("model/b", [2], 4)


def test_show_reads_model_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model({"w\x1b[31m": torch.ones(2, 3)}, tmp_path)
    for place in (tmp_path, tmp_path / "model.safetensors"):
        assert ckpt("show", place) == 0
        assert "w\\x1b[31m  float32  [2, 3]  24 B" in capsys.readouterr().out


def test_verify_names_file_and_tensor(
    folder: CheckpointFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("verify", folder.url) == 0
    assert capsys.readouterr().out.count("ok ") == 3
    damaged = next(Path(folder.path(200)).glob("tensors-*"))
    flip(damaged, 4100)
    assert ckpt("verify", folder.path(200), "--sizes-only") == 0
    assert ckpt("verify", folder.path(200)) == 1
    err = capsys.readouterr().err
    assert damaged.name in err
    assert "model/w" in err
    assert ckpt("verify", folder.url, "--json") == 1
    results = {r["path"]: r["status"] for r in json.loads(capsys.readouterr().out)}
    assert [results[folder.path(step)] for step in (100, 200, 300)] == ["ok", "damaged", "ok"]
    os.truncate(damaged, 4100)
    assert ckpt("verify", folder.path(200), "--sizes_only") == 1
    os.truncate(Path(folder.path(200)) / "manifest.json", 10)
    assert ckpt("verify", folder.path(200)) == 1
    assert "manifest.json" in capsys.readouterr().err


def test_an_unfinished_one_is_no_damage(
    folder: CheckpointFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(folder.path(200)) / "manifest.json").unlink()
    assert ckpt("verify", folder.url) == 0
    assert "unfinished" in capsys.readouterr().out
    assert ckpt("verify", folder.path(200)) == 1


def test_prune(folder: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder.path(400), {}, metadata={"run_id": "other"})
    words = ["prune", folder.url, "--run-id", "r1", "--keep-last", 1]
    best = ["--keep_best", 1, "--metric", "loss"]
    assert ckpt(*words, *best, "--dry-run") == 0
    assert capsys.readouterr().out == f"would remove {folder.path(200)}\n"
    assert len(folder.list()) == 4
    assert ckpt(*words, *best) == 0
    assert capsys.readouterr().out == f"removed {folder.path(200)}\n"
    assert ckpt("prune", folder.url, "--run_id", "r1", "--keep_every", 300) == 0
    assert {info.name for info in folder.list()} == {"step-00000300", "step-00000400"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder with the checkpoints of two runs of a Checkpoint callback."""
    for name, losses in (("digits", (0.5, 0.25, 0.75)), ("other", (0.5, 0.125))):
        saver = Checkpoint(every="1 epoch", monitor="val/loss", keep_last=None, async_save=False)
        accel = Accelerator(cpu=True, project_dir=tmp_path / "project", callbacks=[saver])
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.ones(2, 1))
        model, optimizer, loader = accel.prepare(model, optimizer, loader)
        saver.dirpath = None if name == "digits" else str(tmp_path / "project" / "more")
        with accel.run(name) as run:
            for epoch in run.epochs(len(losses)):
                for batch in loader:
                    accel.backward(model(batch).sum())
                    optimizer.step()
                accel.log({"val/loss": losses[epoch]})
    return tmp_path / "project"


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of a table."""
    return [re.split(r"  +", line) for line in text.splitlines()]


def test_c13_ls_shows_run_and_score_and_looks_one_level_down(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "notes").mkdir()
    assert ckpt("ls", project) == 0
    [head, *rows] = rows_of(capsys.readouterr().out)
    name, run, run_id, score = (head.index(n) for n in ("NAME", "RUN", "RUN-ID", "SCORE"))
    assert [(row[name], row[run], row[score]) for row in rows] == [
        ("checkpoints/step-00000002", "digits", "val/loss=0.5"),
        ("checkpoints/step-00000004", "digits", "val/loss=0.25"),
        ("checkpoints/step-00000006", "digits", "val/loss=0.75"),
        ("more/step-00000002", "other", "val/loss=0.5"),
        ("more/step-00000004", "other", "val/loss=0.125"),
    ]
    newest = read_manifest(project / "more" / "step-00000004")
    assert rows[-1][run_id] == newest.metadata["run_id"]
    assert ckpt("ls", project / "checkpoints" / "step-00000002") == 1
    assert "accel ckpt show" in capsys.readouterr().err


def test_c13_show_of_a_folder_shows_its_newest(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("show", project / "checkpoints", "--pattern", "*/weight") == 0
    out, err = capsys.readouterr()
    assert "models/0/weight" in out
    assert "step-00000006, the newest in" in err
    assert ckpt("show", project) == 2
    assert f"name one of {project / 'checkpoints'}, {project / 'more'}" in capsys.readouterr().err
    shutil.rmtree(project / "more")
    assert ckpt("show", project, "--pattern", "*/weight") == 0
    assert "step-00000006, the newest in" in capsys.readouterr().err


def test_c13_prune_by_name_by_the_only_run_and_of_all_runs(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("prune", project / "checkpoints", "--keep_last", 2, "--dry-run") == 0
    gone = project / "checkpoints" / "step-00000002"
    assert capsys.readouterr().out == f"would remove {gone}\n"
    shutil.move(project / "more" / "step-00000002", project / "checkpoints" / "of-other-1")
    shutil.move(project / "more" / "step-00000004", project / "checkpoints" / "of-other-2")
    assert ckpt("prune", project, "--keep_last", 1) == 2
    err = capsys.readouterr().err
    run_id = read_manifest(gone).metadata["run_id"]
    assert f"digits (--run_id {run_id})" in err
    assert "other (--run_id " in err
    assert ckpt("prune", project, "--keep_last", 1, "--run", "digitz") == 2
    assert "digits (--run_id" in capsys.readouterr().err
    assert ckpt("prune", project, "--keep_last", 2, "--run", "digits") == 0
    assert capsys.readouterr().out == f"removed {gone}\n"
    assert ckpt("prune", project, "--keep_last", 1, "--all_runs") == 0
    left = {path.name for path in (project / "checkpoints").glob("[!.]*")}
    assert left == {"step-00000006", "of-other-2"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prune", "x", "--keep_last", "1"], "--run NAME or --run_id ID"),
        (["prune", "x", "--keep_last", "1", "--run", "a", "--all-runs"], "not allowed with"),
        (["prune", "x", "--run_id", "r1"], "give a rule: --keep_last"),
        (["prune", "x", "--run_id", "r1", "--keep_last", "0"], "at least 1"),
        (["verify", "x", "--sizes_onyl"], "did you mean '--sizes_only'"),
        (["list", "x", "--storage_option", "key"], "KEY=VALUE"),
        (["list"], "FOLDER"),
        (["remove", "x"], "invalid choice"),
        ([], "ACTION"),
    ],
)
def test_a_wrong_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt(*words) == 2
    assert message in capsys.readouterr().err


def test_storage_options_reach_the_driver(capsys: pytest.CaptureFixture[str]) -> None:
    folder = CheckpointFolder("memory://cli", storage_options={"skip_instance_cache": True})
    folder.save(1, {"x": 1})
    words = ["latest", "memory://cli", "--storage-option", "skip_instance_cache=true"]
    assert ckpt(*words) == 0
    assert capsys.readouterr().out.strip() == "memory://cli/step-00000001"
    assert ckpt("list", "nosuch://cli") == 1
    assert "nosuch" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["list", "latest", "show", "verify", "prune"])
def test_help(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt(action, "--help") == 0
    assert "--storage_option" in capsys.readouterr().out


def test_numbers_for_people() -> None:
    texts = [size_of(n) for n in (0, 999, 1000, 1234567, 99_600_000, 999_600_000, 3 * 10**12)]
    assert texts == ["0 B", "999 B", "1 kB", "1.23 MB", "100 MB", "1 GB", "3 TB"]
    assert age_of("2000-01-01T00:00:00.000Z").endswith(" d")
    assert age_of("9999-01-01T00:00:00.000Z") == "now"
    assert age_of("yesterday") == "?"
    assert json.loads(to_json({1: float("nan"), "b": (1, b"x", None)})) == {
        "1": "nan",
        "b": [1, "b'x'", None],
    }
