"""`accel watch`: one picture of a run, and pictures until it has ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from accel_callbacks.cli import watch
from accel_callbacks.cli.main import main
from accel_callbacks.journal import Journal
from checkpoint_io import Lease
from tests.support.journals import write_attempt, write_run

MARKS: list[dict[str, Any]] = [
    {"kind": "train", "time": 1000.5, "step": 0},
    {"kind": "control", "time": 1003.0, "step": 3, "command": "set lr=0.01"},
    {"kind": "save", "time": 1004.0, "step": 4, "path": "checkpoints/step-4"},
    {"kind": "note", "time": 1005.0, "step": 5, "reason": "\x1b[2Ja text of the run"},
]
END = {"kind": "end", "time": 1009.0, "step": 8, "status": "success", "error": None}
FRAME = watch.frame  # also where a test puts another in its place


def drawn(journal: Journal, state: str = "running") -> str:
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(FRAME(journal, state))
    return console.export_text()


def test_a_picture_tells_step_speed_losses_goodput_ranks_and_marks(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        range(1, 9),
        marks=MARKS,
        ranks=2,
        loss=lambda step: float(step),
        step_s=lambda rank: 0.5 + rank,
        forward_s=lambda rank: rank / 4,
    )
    text = drawn(Journal.read(tmp_path))
    assert "demo  running" in text
    assert "step           8, epoch 1, at " in text
    assert "1 steps/s" in text
    assert "8  ▁▂▃▄▅▆▇█" in text
    assert "%" in text.partition("goodput")[2].splitlines()[0]
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any("0 8 0.5 0 0.25" in line for line in lines)
    assert any("1 8 1.5 0 0" in line for line in lines)
    assert any("3 control set lr=0.01" in line for line in lines)
    assert any("4 save checkpoints/step-4" in line for line in lines)
    assert "\x1b[2J" not in text


def test_a_run_without_a_step_and_losses_that_are_not_finite_are_drawn(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [])
    assert "none yet" in drawn(Journal.read(tmp_path / "a"))
    write_run(tmp_path / "b", range(1, 4), loss=lambda step: float("nan"))
    assert "nan" in drawn(Journal.read(tmp_path / "b"))
    write_run(tmp_path / "c", range(1, 4), loss=lambda step: [1.0, float("inf"), 2.0][step - 1])
    assert "2  ▁ █" in drawn(Journal.read(tmp_path / "c"))


def test_one_picture_is_printed_and_a_finished_run_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, range(1, 9), marks=[*MARKS, END])
    assert main(["watch", str(tmp_path), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "ended" in printed
    assert "set lr=0.01" in printed
    assert main(["watch", str(tmp_path)]) == 0  # not a terminal
    assert "ended" in capsys.readouterr().out


def test_pictures_follow_the_run_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, range(1, 4))
    folder = tmp_path / "journal" / "a1"
    pictures: list[str] = []

    def goes_on(journal: Journal, state: str) -> Any:
        """The run goes on after each picture, and ends after the second."""
        pictures.append(drawn(journal, state))
        marks = [END] if len(pictures) > 1 else []
        write_attempt(folder, 1, range(1, 4 + 3 * len(pictures)), marks=marks)
        return FRAME(journal, state)

    monkeypatch.setattr(watch, "frame", goes_on)
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Lease(folder):
        assert main(["watch", str(tmp_path)]) == 0
    steps = [picture.partition("step  ")[2].split(",")[0].strip() for picture in pictures]
    assert steps == ["3", "6", "9"]
    assert ["running" in picture for picture in pictures] == [True, True, False]
    assert "ended" in capsys.readouterr().out


def test_rich_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["watch", str(tmp_path), "--once"]) == 1
    assert "pip install accel-callbacks[ui]" in capsys.readouterr().err


def test_what_is_no_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 1
    assert "has no journal" in capsys.readouterr().err
