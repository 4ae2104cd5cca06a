"""The search for a learning rate: on problems whose answer is known."""

from __future__ import annotations

import csv
import math
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.tuning import LRResult, find_learning_rate


class Bowl:
    """Half the squared distance from 0, from 1 on: SGD diverges above a rate of 2."""

    def __init__(self, rate: Any = 0.1, **group: Any) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([{"params": [self.weight], "lr": rate, **group}])
        self.seen: list[float] = []

    def step(self) -> torch.Tensor:
        self.seen.append(float(self.optimizer.param_groups[0]["lr"]))
        self.optimizer.zero_grad()
        loss = self.weight.square().sum() / 2
        loss.backward()
        self.optimizer.step()
        return loss


def find(bowl: Bowl, **options: Any) -> LRResult:
    holder = torch.nn.ParameterList([bowl.weight])
    return find_learning_rate(bowl.step, bowl.optimizer, **{"restore": [holder], **options})


def test_the_rate_grows_by_one_factor():
    bowl = Bowl()
    result = find(bowl, min_lr=1e-4, max_lr=1e-1, num_steps=4)
    assert bowl.seen == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert result.lrs == pytest.approx(bowl.seen)
    linear = Bowl()
    find(linear, min_lr=0.1, max_lr=0.4, num_steps=4, mode="linear")
    assert linear.seen == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_the_suggestion_is_a_rate_that_trains():
    bowl = Bowl()
    rate = find(bowl, max_lr=100, smoothing=0.0).suggestion()
    assert rate is not None
    assert 0.01 < rate < 2
    bowl.optimizer.param_groups[0]["lr"] = rate
    losses = [bowl.step().item() for _ in range(50)]
    assert losses[-1] < 0.5 * losses[0]


def test_it_stops_when_the_loss_runs_away():
    result = find(Bowl(), min_lr=0.3, max_lr=1e6, num_steps=50)
    assert len(result.lrs) < 50
    assert result.smoothed[-1] > 4 * min(result.smoothed)
    assert len(find(Bowl(), max_lr=1.0, num_steps=20, early_stop=None).lrs) == 20


def test_a_loss_below_zero_does_not_stop_it():
    bowl = Bowl()
    result = find_learning_rate(
        lambda: bowl.step() - 10, bowl.optimizer, max_lr=0.1, num_steps=20, restore=[]
    )
    assert len(result.lrs) == 20


def test_a_loss_that_is_no_number_ends_it():
    bowl = Bowl()
    losses = iter([1.0, 0.5, math.nan, 0.1])
    result = find_learning_rate(lambda: next(losses), bowl.optimizer, num_steps=4)
    assert result.losses[:2] == [1.0, 0.5]
    assert math.isnan(result.losses[2])
    assert len(result.lrs) == 3
    assert result.suggestion(skip_begin=0, skip_end=0) is None


def test_everything_is_as_before():
    bowl = Bowl()
    bowl.step()
    before, rng = bowl.weight.detach().clone(), torch.get_rng_state()
    find(bowl, max_lr=1.0, num_steps=10)
    assert torch.equal(bowl.weight, before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert bowl.optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(bowl.weight.grad, torch.ones(3))


def test_after_an_error_too():
    bowl = Bowl()

    def step() -> torch.Tensor:
        if len(bowl.seen) == 2:
            raise KeyError("label")
        return bowl.step()

    holder = torch.nn.ParameterList([bowl.weight])
    with pytest.raises(KeyError):
        find_learning_rate(step, bowl.optimizer, restore=[holder])
    assert torch.equal(bowl.weight, torch.ones(3))
    assert bowl.weight.grad is None


def test_groups_keep_their_ratio_and_tensors_stay_tensors():
    rate = torch.tensor(0.1)
    bowl = Bowl(rate)
    other = torch.nn.Parameter(torch.ones(1))
    bowl.optimizer.add_param_group({"params": [other], "lr": 0.01})
    ratios = []

    def step() -> float:
        first, second = (float(group["lr"]) for group in bowl.optimizer.param_groups)
        ratios.append(second / first)
        return 1.0

    find_learning_rate(step, bowl.optimizer, num_steps=5)
    assert ratios == pytest.approx([0.1] * 5)
    assert bowl.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


def test_a_prepared_optimizer_before_a_run():
    accel = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.DataLoader(torch.ones(8, 2), 2)
    model, optimizer, data = accel.prepare(
        model, torch.optim.Adam(model.parameters(), lr=0.1), data
    )
    before = model.weight.detach().clone()

    def step() -> torch.Tensor:
        loss = model(torch.ones(4, 2)).square().mean()
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    result = find_learning_rate(step, optimizer, num_steps=20, restore=[model])
    assert result.suggestion() is not None
    assert torch.equal(model.weight, before)
    assert not optimizer.state
    with accel.run("after") as run:
        for batch in data:
            accel.backward(model(batch).mean())
            optimizer.step()
    assert run.global_step == 4


def test_the_steepest_place_counts():
    lrs = [10.0**power for power in range(-6, 1)]
    losses = [5.0, 5.0, 4.9, 3.0, 1.0, 0.9, 9.0]
    assert LRResult(lrs, losses, losses).suggestion(skip_begin=0) == pytest.approx(1e-3)
    rising = [float(index) for index in range(7)]
    assert LRResult(lrs, rising, rising).suggestion(skip_begin=0) is None
    assert LRResult(lrs[:2], losses[:2], losses[:2]).suggestion(skip_begin=0) is None
    assert "suggestion=None" in repr(LRResult([], [], []))


def test_numbers_can_be_written(tmp_path):
    result = find(Bowl(), num_steps=3)
    result.save_csv(tmp_path / "lr.csv")
    with open(tmp_path / "lr.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["lr"]) for row in rows] == result.lrs
    assert [float(row["smoothed"]) for row in rows] == result.smoothed


def test_the_plot_shows_the_suggestion(tmp_path):
    pytest.importorskip("matplotlib")
    result = find(Bowl(), max_lr=100)
    figure = result.plot()
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [line.get_label() for line in axes.lines][:2] == ["loss", "smoothed"]
    assert list(axes.lines[2].get_xdata()) == [result.suggestion()] * 2
    figure.savefig(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").stat().st_size > 1000


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        LRResult([], [], []).plot()


def test_a_step_must_return_its_loss():
    with pytest.raises(TypeError, match="must return the loss"):
        find_learning_rate(lambda: None, Bowl().optimizer)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"min_lr": 0.0}, "min_lr"),
        ({"min_lr": 2.0}, "min_lr"),
        ({"num_steps": 1}, "num_steps"),
        ({"mode": "log"}, "mode"),
        ({"smoothing": 1.0}, "smoothing"),
    ],
)
def test_senseless_arguments_are_refused(wrong, name):
    with pytest.raises(ValueError, match=name):
        find_learning_rate(lambda: 1.0, Bowl().optimizer, **wrong)
