"""Timer: it measures, stops with its reason, and goes on counting after a resume."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint, Timer
from accel_callbacks.callbacks import timer as timer_module


class Clock:
    """The clock of timers, which the work of a run moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr("accel_callbacks.callbacks.timer.time", clock := Clock())
    return clock


def work(seconds: float) -> None:
    timer_module.time.now += seconds


def fit(timer: Timer, *others, epochs: int = 2, pause: float = 0.01, resume: bool = True) -> list:
    """The batches that a run sees until its time is over; four an epoch, each takes a while."""
    accel = Accelerator(cpu=True, callbacks=[timer, *others])
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.arange(4.0))
    model, optimizer, loader = accel.prepare(model, sgd, loader)
    seen = []
    with accel.run("timed", resume=resume) as run:
        for epoch in run.epochs(epochs):
            for batch in loader:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                seen.append((epoch, int(batch)))
                work(pause)
            with accel.evaluate(model):
                work(pause)
    return [seen, run.stop_reason]


@pytest.mark.parametrize("duration", ["5 ms", 0.005, timedelta(milliseconds=5), "00:00:00.005"])
def test_it_stops_at_the_step_where_the_time_is_over(duration):
    assert fit(Timer(duration)) == [[(0, 0)], "the time is up: trained for 0.005 s"]


def test_by_epochs_it_stops_at_the_end_of_one():
    timer = Timer("5 ms", interval="epoch")
    assert not timer.can_vote
    seen, reason = fit(timer)
    assert seen == [(0, n) for n in range(4)]
    assert "the time is up" in reason


def test_without_a_duration_it_only_measures():
    timer = Timer()
    seen, reason = fit(timer)
    assert (len(seen), reason, timer.time_remaining()) == (8, None, None)
    trained, validated = timer.time_elapsed(), timer.time_elapsed("validation")
    assert trained == pytest.approx(0.1)
    assert 0.02 == pytest.approx(validated) == timer.time_elapsed("validate")
    assert timer.time_elapsed("test") == 0.0
    assert timer.start_time("test") is None
    assert timer.start_time() == 1000.0
    assert timer.start_time("validation") == pytest.approx(1000.09)  # the newest
    assert timer.time_elapsed() == trained  # it stands


def test_time_survives_a_resume_and_more_of_it_goes_on():
    def saver() -> Checkpoint:
        return Checkpoint("memory://timer", every="1 epoch")

    first = Timer("15 ms")
    seen, _ = fit(first, saver())
    second = Timer("15 ms")
    assert fit(second, saver()) == [[], "the time is up: trained for 0.015 s"]
    assert second.time_elapsed() >= 0.015
    third = Timer("1 h")
    rest, reason = fit(third, saver())
    assert (len(seen) + len(rest), reason) == (8, None)
    assert third.time_elapsed() >= first.time_elapsed()


def test_a_second_run_resets_the_state():
    timer = Timer("1 h")
    fit(timer, pause=0.02)
    first = timer.time_elapsed()
    accel = Accelerator(cpu=True, callbacks=[timer])
    with accel.run("second"):
        assert timer.time_elapsed() == 0.0
    assert first > 0.0


def test_after_an_error_its_clocks_stand():
    timer = Timer()

    def fails():
        accel = Accelerator(cpu=True, callbacks=[timer])
        with accel.run("fails") as run:
            for _ in run.epochs(1):
                with accel.evaluate():
                    work(0.01)
                    raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    work(1.0)
    assert timer.time_elapsed("validation") == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"duration": "5 steps"}, "duration='5 steps' must be a time"),
        ({"duration": "1 h", "interval": "batch"}, "interval='batch'"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Timer(**options)


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'train'"):
        Timer().time_elapsed("trian")
