"""A disk that is full for a moment: each tracker goes on, and loses the rows that it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from faultkit.disks import tiny_disk

from loggers import RunInfo, TrackerHub, read_csv, read_jsonl

NAMES = ("tensorboard", "jsonl", "csv")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tiny_disk(tmp_path, megabytes=1) as path:
        yield path


def fill(disk: Path) -> Path:
    """Use up the disk to its last byte."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return filler


def log(hub: TrackerHub, steps: range) -> None:
    for step in steps:
        hub.log({"loss": step / 2, "lr": 0.1}, step)
        if step % 100 == 0:
            hub.flush()


def wait_for(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(0.02)


def steps_in(folder: Path) -> dict[str, list[int]]:
    """Read the steps that the files of each tracker have."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    losses, rates = ([event.step for event in events.Scalars(tag)] for tag in ("loss", "lr"))
    assert losses[: len(rates)] == rates, "a row before the last one is there in part"
    rows = {"jsonl": read_jsonl(folder / "metrics.jsonl"), "csv": read_csv(folder / "metrics.csv")}
    steps = {name: [row["step"] for row in logged if "loss" in (row.get("values") or row)]
             for name, logged in rows.items()}  # fmt: skip
    return {"tensorboard": rates, **steps}


def test_a_moment_costs_no_row(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TrackerHub(NAMES, run=RunInfo("digits", str(disk), "a1")) as hub:
        log(hub, range(700))
        filler = fill(disk)
        log(hub, range(700, 1300))
        wait_for(lambda: all(report.failures for report in hub.report().values()))
        filler.unlink()
        log(hub, range(1300, 2000))
    for name, steps in steps_in(disk).items():
        report = hub.report()[name]
        assert steps == list(range(2000)), name
        assert (report.rows, report.lost_rows, report.disabled) == (2000, 0, False), name
    assert caplog.text.count("No space left on device. Training continues; it is tried again") == 3


def test_what_does_not_fit_into_memory_is_lost_and_told(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loggers.trackers.line_file._FULL", 8192)
    monkeypatch.setattr("loggers.trackers.csv._FULL", 100)
    monkeypatch.setattr("loggers.trackers.line_file._MOST_HELD", 16384)
    with TrackerHub(NAMES, run=RunInfo("digits", str(disk), "a1")) as hub:
        log(hub, range(300))
        filler = fill(disk)
        log(hub, range(300, 1300))
        wait_for(lambda: all(report.lost_rows for report in hub.report().values()))
        filler.unlink()
        log(hub, range(1300, 2000))
    steps = steps_in(disk)
    for name, report in hub.report().items():
        assert len(steps[name]) == report.rows == 2000 - report.lost_rows, name
        assert steps[name][-700:] == list(range(1300, 2000)), name
        assert not report.disabled


def test_a_disk_that_stays_full_is_told(disk: Path) -> None:
    hub = TrackerHub(NAMES, run=RunInfo("digits", str(disk), "a1"))
    hub.start()
    log(hub, range(700))
    hub.flush()
    fill(disk)
    log(hub, range(700, 1300))
    hub.finish()
    for name, steps in steps_in(disk).items():
        report = hub.report()[name]
        assert report.rows + report.lost_rows == 1300, name
        assert 700 <= report.rows <= len(steps), name
        assert report.lost_rows > 400, name
