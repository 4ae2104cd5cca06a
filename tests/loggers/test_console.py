from __future__ import annotations

import fcntl
import io
import os
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from typing import Any

import pytest

from loggers import ConsoleTracker, RunInfo, TrackerHub

RUN = RunInfo("digits", "runs", "a1")


def _table(rows: list[tuple[int, dict[str, Any]]], *args: Any) -> list[list[str]]:
    file = io.StringIO()
    tracker = ConsoleTracker(*args, file=file)
    tracker.start(RUN)
    for step, values in rows:
        tracker.log(values, step)
    tracker.finish()
    lines = [line.partition("  +")[0] for line in file.getvalue().splitlines()]
    assert len({len(line) for line in lines}) <= len([one for one in lines if "step" in one])
    return [line.split() for line in lines]


def test_newest_values_and_a_header_for_new_columns() -> None:
    rows = [(1, {"loss": 0.512345, "note": "x"}), (2, {"lr": 1e-7}), (30, {"loss": 2.0})]
    assert _table(rows, 0) == [
        ["step", "loss"],
        ["1", "0.5123"],
        ["step", "loss", "lr"],
        ["2", "0.5123", "1e-07"],
        ["30", "2", "1e-07"],
    ]


def test_one_line_in_its_time_and_the_last() -> None:
    table = _table([(step, {"loss": step / 2}) for step in range(1, 100)], 1000)
    assert table == [["step", "loss"], ["1", "0.5"], ["99", "49.5"]]


def test_the_header_comes_again() -> None:
    table = _table([(step, {"loss": 1.5}) for step in range(60)], 0)
    assert sum(row[0] == "step" for row in table) == 3


def test_columns_that_are_asked_for_in_their_order() -> None:
    row = {"a": 1, "val/acc": 0.5, "note": "two words", "val/loss": float("nan")}
    assert _table([(5, row)], 0, ["note", "val/*"]) == [
        ["step", "note", "val/acc", "val/loss"],
        ["5", "two", "words", "0.5", "nan"],
    ]


@pytest.mark.parametrize(("columns", "shown"), [("", 7), ("80", 5), ("160", 12)])
def test_not_more_columns_than_fit(
    monkeypatch: pytest.MonkeyPatch, columns: str, shown: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    header, row = _lines({f"m{i}": i for i in range(50)})
    assert header.split() == ["step", *(f"m{i}" for i in range(shown)), f"+{50 - shown}"]
    assert row.split() == ["1", *(str(i) for i in range(shown))]
    assert max(len(header), len(row)) <= int(columns or "100")


@pytest.fixture
def unset_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.usefixtures("unset_columns")
def test_long_names_are_shortened_in_the_middle_as_far_as_needed() -> None:
    name = "gradients/layers.11.attention.weight"
    assert name in _lines({name: 1.5, "loss": 0.5})[0]
    header, row = _lines({name: 1.5, **{f"loss/{i}": 0.5 for i in range(5)}})
    assert header.split()[1] == "gradients/l..tion.weight"
    assert len(header) == len(row) <= 100
    assert _lines({"loss": 10**12})[1].split() == ["1", "1e+12"]


@pytest.mark.usefixtures("unset_columns")
def test_names_that_callbacks_log_come_last_and_are_left_out_first() -> None:
    run = replace(RUN, secondary={"lr", *(f"stats/{i}" for i in range(20))})
    values = {**{f"stats/{i}": i for i in range(20)}, "lr": 0.1, "train/loss": 0.5, "val": 1}
    header, _ = _lines(values, run=run)
    assert header.split() == ["step", "train/loss", "val", *(f"stats/{i}" for i in range(5)), "+16"]


def _lines(values: dict[str, Any], run: RunInfo = RUN) -> list[str]:
    file = io.StringIO()
    tracker = ConsoleTracker(0, file=file)
    tracker.start(run)
    tracker.log(values, 1)
    return file.getvalue().splitlines()


def test_the_width_is_that_of_a_terminal() -> None:
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(follower, "w") as file:
        tracker = ConsoleTracker(0, file=file)
        tracker.start(RUN)
        tracker.log({f"m{i}": i for i in range(9)}, 1)
        header, row = os.read(leader, 4096).decode().splitlines()
    os.close(leader)
    assert header.split() == ["step", "m0", "m1", "m2", "+6"]
    assert row.split() == ["1", "0", "1", "2"]


def test_arguments_and_protocol() -> None:
    with pytest.raises(ValueError, match="every_s"):
        ConsoleTracker(-1)
    with pytest.raises(TypeError, match=r"\['loss'\]"):
        ConsoleTracker(columns="loss")
    tracker = ConsoleTracker(file=io.StringIO())
    tracker.finish()
    with pytest.raises(RuntimeError, match="start"):
        tracker.log({"a": 1}, 1)
    with pytest.raises(ValueError, match="interrupted"):
        tracker.finish("done")  # type: ignore[arg-type]


def test_through_a_hub_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (True, False):
        tracker = ConsoleTracker(0)
        with TrackerHub([tracker], run=RUN, main_process=main, strict=True) as hub:
            hub.log({"loss": 0.25}, 3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.split() == ["step", "loss", "3", "0.25"]


BAR = """
import sys
from tqdm import tqdm
from loggers import ConsoleTracker, RunInfo

tracker = ConsoleTracker(0)
tracker.start(RunInfo("digits", "runs", "a1"))
with tqdm(total=10, mininterval=0, ncols=60, desc="bar", file=sys.stderr) as bar:
    for step in range(10):
        bar.update()
        tracker.log({"loss": 0.125}, step)
tracker.finish()
"""


def test_a_bar_stays_whole() -> None:
    """No line of the table stands beside the bar: it is wiped first and drawn again below."""
    done = subprocess.run(
        [sys.executable, "-c", BAR], capture_output=True, check=True, env=os.environ
    )
    shown = []
    for line in done.stderr.decode().split("\n"):
        text = ""
        for part in line.split("\r"):  # what overwrites what, as a terminal has it
            text = part + text[len(part) :]
        shown.append(text.strip())
    assert shown[:11] == ["step        loss", *(f"{step:>1}       0.125" for step in range(10))]
