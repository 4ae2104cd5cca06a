from __future__ import annotations

import csv
import errno
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from loggers import CSVTracker, RunInfo, TrackerHub, read_csv

Rows = Mapping[int, Mapping[str, Any]]


def _used(
    run: RunInfo, rows: Rows, *, tracker: CSVTracker | None = None, state: Any = None
) -> dict[str, Any]:
    """One process, whose rows are written one by one; the state that a checkpoint would have."""
    tracker = tracker or CSVTracker()
    if state is not None:
        tracker.load_state_dict(state)
    tracker.start(run)
    for step, values in rows.items():
        tracker.log(values, step, time=float(step))
        tracker.flush()
    saved = tracker.state_dict()
    tracker.finish()
    return saved


def _losses(steps: range) -> Rows:
    return {step: {"loss": float(step)} for step in steps}


def _history(path: Any, **kwargs: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(row["step"], row["values"]) for row in read_csv(path, **kwargs)]


@pytest.fixture
def path(run_info: Callable[..., RunInfo]) -> Path:
    return Path(run_info().logging_dir, "metrics.csv")


def test_columns_come_later_and_other_readers_agree(
    run_info: Callable[..., RunInfo], path: Path
) -> None:
    with TrackerHub(["csv"], run=run_info(), strict=True) as hub:
        hub.log({"loss": 0.1}, 1)
        hub.flush()
        hub.log({"val": {"loss": 2}, "note": 'a "b", c\nd', "a,b": -1e-30}, 2)
        hub.flush()
        hub.log({"loss": 0.3, "step": 7}, 3)
    assert _history(path) == [
        (1, {"loss": 0.1}),
        (2, {"val/loss": 2, "note": 'a "b", c\\nd', "a,b": -1e-30}),
        (3, {"loss": 0.3, "step": 7}),
    ]
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "time", "run", "loss", "val/loss", "note", "a,b", "step"]
    assert {len(row) for row in rows} == {len(header)}
    assert [row[3] for row in rows] == ["0.1", "", "0.3"]
    assert '"a1",0.1' in path.read_text()  # text quoted, numbers bare


def test_numbers_that_are_none_and_text_that_looks_like_one(
    run_info: Callable[..., RunInfo], path: Path
) -> None:
    values = {"nan": math.nan, "inf": -math.inf, "text": "1.5", "empty": "", "big": 2**70}
    _used(run_info(), {1: values})
    ((_, read),) = _history(path)
    assert math.isnan(read.pop("nan"))
    assert read == {"inf": -math.inf, "text": "1.5", "empty": "", "big": 2**70}
    assert ',nan,-inf,"1.5","",' in path.read_text()


def test_a_resume_cuts_back_and_goes_on(run_info: Callable[..., RunInfo], path: Path) -> None:
    state = _used(run_info(run_id="a1"), _losses(range(1, 4)))
    _used(run_info(3), {4: {"loss": 4.0}, 5: {"late": 1}}, state=state)  # and was then killed
    _used(run_info(3), {4: {"loss": 40.0, "other": 2}}, state=state)
    kept = [(step, {"loss": float(step)}) for step in (1, 2, 3)]
    assert _history(path) == [*kept, (4, {"loss": 40.0, "other": 2})]
    assert path.read_text().splitlines()[0] == "step,time,run,loss,late,other"
    assert [path.name] == [one.name for one in path.parent.iterdir()]


def test_runs_share_a_file_and_none_is_deleted(
    run_info: Callable[..., RunInfo], path: Path
) -> None:
    first = _used(run_info(run_id="a1"), _losses(range(1, 6)))
    _used(run_info(run_id="b2"), {1: {"acc": 0.5}, 2: {"acc": 0.6}})
    assert _history(path) == [(1, {"acc": 0.5}), (2, {"acc": 0.6})]
    assert [step for step, _ in _history(path, run="a1")] == [1, 2, 3, 4, 5]
    _used(run_info(2, run_id="a1"), _losses(range(3, 4)), state={**first, "last_step": 2})
    assert [step for step, _ in _history(path)] == [1, 2, 3]
    assert [step for step, _ in _history(path, run="b2")] == [1, 2]
    again = _used(run_info(run_id="a1"), _losses(range(1, 2)))  # afresh, under a name that is there
    assert again["run_id"] == "a1-2"
    assert [step for step, _ in _history(path, run="a1")] == [1, 2, 3]
    assert [step for step, _ in _history(path)] == [1]


@pytest.mark.parametrize("tail", [b'6,1.0,"a1",0.', b'6,1.0,"a1",1.0,"open', b"7"])
def test_a_torn_row_is_skipped_and_removed(
    tail: bytes, run_info: Callable[..., RunInfo], path: Path
) -> None:
    state = _used(run_info(), _losses(range(1, 4)))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert [step for step, _ in _history(path)] == [1, 2, 3]
    _used(run_info(3), {}, state=state)
    assert path.read_bytes() == whole
    path.write_bytes(b"step,ti")  # killed within its first write
    _used(run_info(), _losses(range(1, 2)))
    assert _history(path) == [(1, {"loss": 1.0})]


def test_a_file_of_somebody_else_is_left_alone(
    run_info: Callable[..., RunInfo], path: Path
) -> None:
    for content in ("epoch,loss\n1,2\n", "step,loss", "x"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        with pytest.raises(ValueError, match="another filename"):
            CSVTracker().start(run_info())
        assert path.read_text() == content
    path.write_text("epoch,loss\n1,2\n")
    with pytest.raises(ValueError, match="not written by CSVTracker"):
        read_csv(path)


KILLED = """
import os, sys
from loggers import CSVTracker, RunInfo
from loggers.trackers import line_file

tracker = CSVTracker()
tracker.start(RunInfo("digits", sys.argv[1], "a1"))
for step in range(1, 50):
    tracker.log({"loss": 1.0}, step)
tracker.flush()
setattr(line_file.os, sys.argv[2], lambda *args: os._exit(9))
tracker.log({"new": 1.0}, 50)
tracker.state_dict()
"""


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_kill_while_the_header_grows_loses_nothing(
    at: str, run_info: Callable[..., RunInfo], path: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(path.parent), at]
    assert subprocess.run(command, check=False).returncode == 9
    assert [step for step, _ in _history(path)] == list(range(1, 50))
    _used(run_info(49), {50: {"new": 1.0}})
    assert _history(path)[-2:] == [(49, {"loss": 1.0}), (50, {"new": 1.0})]


def test_columns_have_a_limit(run_info: Callable[..., RunInfo], path: Path) -> None:
    tracker = CSVTracker(max_columns=2)
    with pytest.warns(UserWarning, match=r"'c' and later names") as caught:
        _used(run_info(), {1: {"a": 1, "b": 2, "c": 3}, 2: {"d": 4, "a": 5}}, tracker=tracker)
    assert len(caught) == 1
    assert _history(path) == [(1, {"a": 1, "b": 2}), (2, {"a": 5})]


def test_a_store(run_info: Callable[..., RunInfo]) -> None:
    folder = "memory://tracker-csv"
    state = _used(run_info(logging_dir=folder), {1: {"a": 1}, 2: {"b": 2}})
    _used(run_info(2, logging_dir=folder), {3: {"c": 3}}, state=state)
    assert _history(f"{folder}/metrics.csv") == [(1, {"a": 1}), (2, {"b": 2}), (3, {"c": 3})]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_loses_no_row_once_there_is_room(
    run_info: Callable[..., RunInfo], path: Path
) -> None:
    tracker = CSVTracker()
    tracker.start(run_info())
    tracker.log({"a": 1}, 1)
    file = tracker.raw
    full, room = os.open("/dev/full", os.O_WRONLY), file._fd
    file._fd = full
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        tracker.flush()
    tracker.log({"a": 2}, 2)
    file._fd = room
    os.close(full)
    tracker.finish("failed")
    assert [step for step, _ in _history(path)] == [1, 2]


def test_protocol(run_info: Callable[..., RunInfo], path: Path) -> None:
    tracker = CSVTracker()
    tracker.finish()
    with pytest.raises(RuntimeError, match="start"):
        tracker.log({"a": 1}, 1)
    with pytest.raises(ValueError, match="interrupted"):
        tracker.finish("done")  # type: ignore[arg-type]
    _used(run_info(rank=2), {1: {"a": 1}}, tracker=tracker)
    _used(run_info(rank=2, run_id="b2"), {1: {"a": 2}}, tracker=tracker)  # a second run
    tracker.finish()
    assert _history(path.with_name("metrics-rank2.csv")) == [(1, {"a": 2})]
