"""One grammar of intervals, and when they are over."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import interval
from accel_callbacks.callbacks.interval import Cadence, Interval


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("100 steps", 100, "steps"),
        ("1step", 1, "steps"),
        ("step", 1, "steps"),
        ("2 epochs", 2, "epochs"),
        ("3ep", 3, "epochs"),
        ("30s", 30, "seconds"),
        ("10 min", 600, "seconds"),
        ("1.5h", 5400, "seconds"),
        (".5 min", 30, "seconds"),
        ("1H 30Min", 5400, "seconds"),
        ("1d2h3m4s", 93784, "seconds"),
        ("250 ms", 0.25, "seconds"),
        ("01:30:00", 5400, "seconds"),
        ("1:00:00:00", 86400, "seconds"),
        ("00:00:01.5", 1.5, "seconds"),
        ("0.1 run", 0.1, "run"),
        (" 5 steps ", 5, "steps"),
        (timedelta(minutes=2), 120, "seconds"),
        (90, 90, "seconds"),
        (0.5, 0.5, "seconds"),
    ],
)
def test_an_interval_is_read(text, amount, unit):
    assert Interval.parse(text) == Interval(amount, unit)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("100", "not an interval"),
        ("10 stepz", "Did you mean 'step"),
        ("1h 5 steps", "mixes"),
        ("1 epoch 1 epoch", "mixes"),
        ("1.5 steps", "whole number of steps"),
        ("0 s", "above 0"),
        ("-5 s", "not an interval"),
        (0, "above 0"),
        (float("inf"), "above 0"),
        (float("nan"), "above 0"),
        (timedelta(0), "above 0"),
        ("01:30", "not an interval"),
        ("01:61:00", "not an interval"),
        ("2 run", "at most 1"),
    ],
)
def test_what_is_no_interval_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        Interval.parse(text)


@pytest.mark.parametrize("value", [None, True, [1], b"1s"])
def test_other_objects_are_a_type_error(value):
    with pytest.raises(TypeError, match="is not an interval"):
        Interval.parse(value)


def test_where_only_a_time_makes_sense_steps_are_refused():
    with pytest.raises(ValueError, match="duration='5 steps' must be a time"):
        Interval.seconds("5 steps", "duration")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("1 step", "1 step"), ("2 epochs", "2 epochs"), ("90s", "0:01:30"), ("5s", "5 s")],
)
def test_an_interval_is_shown_as_people_write_it(text, shown):
    assert str(Interval.parse(text)) == shown


def epochs(run, count: int, loader):
    """The places of a run, one a batch."""
    for _ in run.epochs(count):
        for _ in loader:
            yield run


def due_at(text: str, total: int = 4, batches: int = 5) -> list[float]:
    """After which batches an interval is over."""
    accel = Accelerator(cpu=True)
    loader = accel.prepare(torch.utils.data.DataLoader(range(batches)))
    cadence, seen = Cadence(text), []
    with accel.run("due") as run:
        cadence.start(run)
        for count, _ in enumerate(epochs(run, total, loader), start=1):
            if cadence.take(run):
                seen.append(count)
    return seen


@pytest.mark.parametrize(
    ("text", "batches"),
    [
        ("0.25 run", [5, 10, 15, 20]),
        ("0.1 run", list(range(2, 21, 2))),
        ("0.5 run", [10, 20]),
        ("1 run", [20]),
    ],
)
def test_parts_of_a_run_are_over_where_they_should_be(text, batches):
    assert due_at(text) == batches


def test_a_resumed_run_does_not_catch_up_on_parts():
    accel = Accelerator(cpu=True)
    cadence = Cadence("0.1 run")
    with accel.run("resumed") as run:
        run.first_epoch = 3
        cadence.start(run)
        due = [cadence.take(run) for _ in run.epochs(5)]
    assert due == [False, True]


def test_a_part_of_a_run_without_an_end_is_an_error():
    run = Accelerator(cpu=True).current_run
    with pytest.raises(RuntimeError, match=r"run\.epochs"):
        Cadence("0.1 run").is_due(run)


def test_time_counts_from_what_was_done_last(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(interval, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run, cadence = Accelerator(cpu=True).current_run, Cadence("20 ms")
    assert not cadence.take(run)  # the first look starts it
    now[0] += 0.03
    assert cadence.is_due(run)
    cadence.start(run)
    assert not cadence.is_due(run)
