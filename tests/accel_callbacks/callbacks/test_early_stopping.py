"""EarlyStopping: thresholds, minima, a metric that never comes, two runs. The rest of it is tested
in test_callbacks.py."""

from __future__ import annotations

import math

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import EarlyStopping


def epochs_run(values: list, batches: int = 0, **options) -> tuple[int, str | None]:
    """How many epochs a run goes that logs these values, one an epoch, and why it stopped."""
    accel = Accelerator(cpu=True, callbacks=[EarlyStopping("val", **options)])
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    count = 0
    with accel.run("stop") as run:
        for epoch in run.epochs(len(values)):
            for _ in range(batches):
                accel.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
            accel.log({"val": values[epoch]})
            count += 1
    return count, run.stop_reason


@pytest.mark.parametrize(
    ("values", "options", "epochs", "says"),
    [
        ([3, 2, 1, 0], {"stopping_threshold": 1.5}, 3, "reached 1, better than 1.5"),
        ([1, 2, 3], {"stopping_threshold": 1.5, "mode": "max"}, 2, "reached 2, better than 1.5"),
        ([3, 1.5, 1], {"stopping_threshold": 1.5}, 3, "reached 1, better"),
        ([1, 1.5, 2], {"stopping_threshold": 1.5, "mode": "max"}, 3, "reached 2, better"),
        ([3, 9, 1], {"divergence_threshold": 5.0}, 2, "diverged: 9 is worse than 5"),
        ([3, 1, 3], {"divergence_threshold": 2.0, "mode": "max"}, 2, "diverged: 1 is worse than 2"),
        ([3, 2, 1, 0], {"divergence_threshold": 5.0, "stopping_threshold": -1.0}, 4, None),
        # minima hold back what is no alarm
        ([1] * 6, {"patience": 1, "min_epochs": 4}, 4, "did not improve on 1 in 3 checks"),
        ([1] * 6, {"patience": 1, "min_epochs": 1}, 2, "in 1 checks"),
        ([3, 2, 1], {"stopping_threshold": 9.0, "min_epochs": 2}, 2, "reached 2"),
        ([1, math.nan, 1, 1], {"min_epochs": 4}, 2, "val is nan"),
        ([1, 9, 1, 1], {"divergence_threshold": 5.0, "min_epochs": 4}, 2, "diverged"),
        ([1] * 6, {"patience": 1, "min_steps": 7, "batches": 2}, 4, "in 3 checks"),
        # and an improvement takes back what they held back
        ([5, 5, 4, 3, 2, 1], {"patience": 1, "min_epochs": 3}, 6, None),
        ([1, 3, 3, 3], {"stopping_threshold": 2.0, "min_epochs": 2, "patience": 9}, 4, None),
    ],
)
def test_it_stops_for_its_reasons_once_it_may(values, options, epochs, says):
    count, reason = epochs_run(values, **options)
    assert count == epochs
    assert (reason is None) == (says is None)
    assert says is None or says in reason


@pytest.mark.parametrize("name", ["min_epochs", "min_steps"])
def test_negative_minima_are_refused(name):
    with pytest.raises(ValueError, match=name):
        EarlyStopping("val", **{name: -1})


def log_run(logged: dict, epochs: int = 2, batches: int = 2, leave: bool = False, **options) -> int:
    accel = Accelerator(cpu=True, callbacks=[EarlyStopping("val/loss", **options)])
    loader = accel.prepare(torch.utils.data.DataLoader(range(batches)))
    with accel.run("strict") as run:
        for _ in run.epochs(epochs):
            for _ in loader:
                if leave:
                    break
            accel.log(logged)
    return run.epochs_done


def test_a_metric_that_never_comes_is_an_error_that_says_what_there_was():
    with pytest.raises(RuntimeError) as error:
        log_run({"val/lose": 1.0, "train/loss": 2.0})
    assert str(error.value) == (
        "EarlyStopping watches 'val/loss', but only 'train/loss', 'val/lose' was logged by the end "
        "of an epoch. Did you mean 'val/lose'? Pass strict=False if it comes later."
    )


def test_where_nothing_was_logged_it_says_so():
    with pytest.raises(RuntimeError, match="but nothing was logged by the end"):
        log_run({})


@pytest.mark.parametrize("options", [{"strict": False}, {"leave": True}])
def test_it_may_be_missing_on_purpose(options):
    assert log_run({"other": 1.0}, **options) == 2


def validated_every(every: int, epochs: int, name: str) -> int:
    accel = Accelerator(cpu=True, callbacks=[EarlyStopping("val", patience=1)])
    train, val = (torch.utils.data.DataLoader(range(2)) for _ in range(2))
    train, val = accel.prepare(train, val)
    with accel.run("rare") as run:
        for epoch in run.epochs(epochs):
            for _ in train:
                pass
            if (epoch + 1) % every == 0:
                with accel.evaluate():
                    for _ in val:
                        pass
                accel.log({name: 1.0})
    return run.epochs_done


def test_epochs_without_an_evaluation_are_no_missed_metric():
    assert validated_every(2, 8, "val") == 4
    with pytest.raises(RuntimeError, match="Did you mean 'vall'"):
        validated_every(2, 8, "vall")
    with pytest.warns(UserWarning, match="watches 'val'"):
        assert validated_every(9, 8, "val") == 8


def test_a_plain_loop_validates_after_its_epoch():
    accel = Accelerator(cpu=True, callbacks=[EarlyStopping("val", patience=1)])
    train = accel.prepare(torch.utils.data.DataLoader(range(2)))
    epochs = 0
    for _ in range(5):
        for _ in train:
            pass
        with accel.evaluate():
            pass
        accel.log({"val": 1.0})
        epochs += 1
        if accel.current_run.should_stop:
            break
    assert epochs == 2


def test_a_plain_loop_that_never_logs_is_told_after_its_second_epoch():
    accel = Accelerator(cpu=True, callbacks=[EarlyStopping("val")])
    train = accel.prepare(torch.utils.data.DataLoader(range(2)))

    def go(epochs: int) -> None:
        for _ in range(epochs):
            for _ in train:
                pass

    go(1)
    with pytest.raises(RuntimeError, match="watches 'val'"):
        go(1)


def test_a_second_run_resets_the_state():
    stopper = EarlyStopping("val", patience=2)
    accel = Accelerator(cpu=True, callbacks=[stopper])
    counts = []
    for start in (1.0, 5.0):
        with accel.run("again") as run:
            for _ in run.epochs(9):
                accel.log({"val": start})
        counts.append(run.epochs_done)
    assert counts == [3, 3]
    assert stopper.best == 5.0


def test_what_was_held_back_survives_a_resume():
    first = EarlyStopping("val", patience=1, min_epochs=5)
    accel = Accelerator(cpu=True, callbacks=[first])
    with accel.run("first") as run:
        for _ in run.epochs(3):
            accel.log({"val": 1.0})
    assert first.stop_reason is None
    second = EarlyStopping("val", patience=1, min_epochs=4)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.state_dict()["held_back"] == "val did not improve on 1 in 2 checks"
