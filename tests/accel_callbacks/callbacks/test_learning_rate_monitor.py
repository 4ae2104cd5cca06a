"""LearningRateMonitor: names, steps, values of the step that used them."""

from __future__ import annotations

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import LearningRateMonitor
from loggers import read_jsonl


class Logged(Callback):
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict]] = []

    def on_log(self, run, model, metrics, step):
        self.rows.append((step, {k: float(v) for k, v in metrics.items()}))


def fit(monitor: LearningRateMonitor, *groups: dict, optimizer=torch.optim.AdamW, **options):
    """Two epochs of two steps; the rate halves at each step."""
    logged = Logged()
    accel = Accelerator(cpu=True, callbacks=[monitor, logged], **options)
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in groups or (1,)])
    parameters = [
        {"params": layer.parameters(), **group}
        for layer, group in zip(model, groups or ({},), strict=True)
    ]
    optimizer = optimizer(parameters, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = torch.utils.data.DataLoader(torch.ones(2, 1))
    model, optimizer, scheduler, loader = accel.prepare(model, optimizer, scheduler, loader)
    with accel.run("rates") as run:
        for _ in run.epochs(2):
            for batch in loader:
                accel.backward(sum(layer(batch).sum() for layer in model))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if "log_with" in options:
                    accel.log({"loss": 1.0})
    return logged.rows


@pytest.mark.parametrize(
    ("interval", "rows"),
    [
        ("step", [(1, 1.0), (2, 0.5), (3, 0.25), (4, 0.125)]),
        ("2 steps", [(2, 0.5), (4, 0.125)]),
        ("epoch", [(2, 0.25), (4, 0.0625)]),
        ("2 epochs", [(4, 0.0625)]),
    ],
)
def test_the_rate_of_the_step_is_logged_at_the_step(interval, rows):
    assert fit(LearningRateMonitor(interval)) == [(s, {"lr-AdamW": rate}) for s, rate in rows]


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        (({}, {}), ["lr-AdamW/group1", "lr-AdamW/group2"]),
        (({"name": "body"}, {}), ["lr-AdamW/body", "lr-AdamW/group2"]),
        (({"name": "a"}, {"name": "a"}), ["lr-AdamW/a1", "lr-AdamW/a2"]),
        (({"name": "all"},), ["lr-AdamW/all"]),
    ],
)
def test_groups_have_names(groups, names):
    monitor = LearningRateMonitor()
    assert list(fit(monitor, *groups)[0][1]) == names
    assert list(monitor.last) == names


def test_momentum_and_weight_decay_are_there_if_asked_for():
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    first = fit(monitor, {"betas": (0.8, 0.9), "weight_decay": 0.25})[0][1]
    expected = {"lr-AdamW": 1.0, "lr-AdamW-momentum": 0.8, "lr-AdamW-weight_decay": 0.25}
    assert first == expected
    sgd = fit(LearningRateMonitor(log_momentum=True), {"momentum": 0.5}, optimizer=torch.optim.SGD)
    assert sgd[0][1] == {"lr-SGD": 1.0, "lr-SGD-momentum": 0.5}


def test_of_two_optimizers_each_logs_its_own_steps():
    logged = Logged()
    accel = Accelerator(cpu=True, callbacks=[LearningRateMonitor(), logged])
    model = torch.nn.Linear(1, 1)
    both = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.25)]
    model, first, second = accel.prepare(model, *both)
    for optimizer in (first, second, second):
        accel.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
    assert [row for _, row in logged.rows] == [
        {"lr-SGD": 0.5},
        {"lr-SGD-1": 0.25},
        {"lr-SGD-1": 0.25},
    ]


def with_tensor(parameters, lr):
    return torch.optim.Adam(parameters, lr=torch.tensor(lr), foreach=False)


def test_a_rate_that_is_a_tensor_is_the_one_of_its_step():
    """A tracker reads it later, when the scheduler has changed it in place."""
    monitor = LearningRateMonitor()
    accel = Accelerator(cpu=True, callbacks=[monitor])
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, with_tensor(model.parameters(), 1.0))
    accel.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    optimizer.param_groups[0]["lr"].mul_(0.5)
    assert monitor.last["lr-Adam"].item() == 1.0


def test_rates_stand_beside_what_the_loop_logs_at_the_step(tmp_path):
    fit(LearningRateMonitor(), log_with="jsonl", project_dir=str(tmp_path))
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if row["type"] == "metrics"]
    rates = {row["step"]: row["values"]["lr-AdamW"] for row in rows if "lr-AdamW" in row["values"]}
    losses = {row["step"] for row in rows if "loss" in row["values"]}
    assert rates == {1: 1.0, 2: 0.5, 3: 0.25, 4: 0.125}
    assert losses == set(rates)


@pytest.mark.parametrize("interval", ["10 min", "0.1 run", "steps of two"])
def test_other_intervals_are_refused(interval):
    with pytest.raises(ValueError, match=r"interval|unit"):
        LearningRateMonitor(interval)
