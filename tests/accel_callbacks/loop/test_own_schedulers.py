"""Schedulers that are no LRScheduler step as they are called, and are saved and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.scheduler import AcceleratedScheduler


class Told:
    """A scheduler in the form of timm's: it is told the epoch, or the number of updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.metric: Any = None
        self.calls: list[str] = []

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.metric = metric
        self.calls.append(f"epoch {epoch}")
        self._set(1.0 / (epoch + 1))

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.metric = metric
        self.calls.append(f"update {num_updates}")
        self._set(0.1 ** (1 + num_updates))

    def _set(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Halving:
    """A scheduler that counts itself, with its optimizer under another name."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.opt = optimizer
        self.count = 0

    def step(self) -> None:
        self.count += 1
        for group in self.opt.param_groups:
            group["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Average:
    """What has the methods of a scheduler, and no optimizer."""

    def __init__(self) -> None:
        self.shadow = [torch.ones(1)]

    def step(self, parameters: Any) -> None:
        self.shadow = [parameter.clone() for parameter in parameters]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def train(scheduler: Any, folder: Path, load: str | None = None, **options: Any) -> tuple:
    accel = Accelerator(cpu=True, project_dir=folder, **options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = DataLoader(torch.ones(4, 1), batch_size=1)
    model, optimizer, schedule, data = accel.prepare(model, optimizer, scheduler(optimizer), data)
    if load is not None:
        accel.load_state(load)
        return accel, schedule
    for update, batch in enumerate(data):
        with accel.accumulate(model):
            accel.backward(model(batch).sum())
            optimizer.step()
            if isinstance(schedule.scheduler, Told):
                schedule.step_update(update, metric=0.5)
            else:
                schedule.step()
            optimizer.zero_grad()
    if isinstance(schedule.scheduler, Told):
        schedule.step(0, 0.25)
    return accel, schedule


@pytest.mark.parametrize("window", [1, 2])
def test_each_call_is_meant_as_it_is(window, tmp_path: Path):
    _, told = train(Told, tmp_path, gradient_accumulation_steps=window)
    assert isinstance(told, AcceleratedScheduler)
    assert told.calls == ["update 0", "update 1", "update 2", "update 3", "epoch 0"]
    assert told.metric == 0.25
    _, halving = train(Halving, tmp_path, gradient_accumulation_steps=window)
    assert halving.count == 4


@pytest.mark.parametrize("kind", [Told, Halving])
def test_its_state_is_saved_and_restored(kind, tmp_path: Path):
    accel, schedule = train(kind, tmp_path)
    saved = accel.save_state()
    _, fresh = train(kind, tmp_path / "other", load=saved)
    assert fresh.state_dict() == schedule.state_dict()


def test_what_has_no_optimizer_is_returned_as_it_is(tmp_path: Path):
    average, scaler = Average(), torch.amp.GradScaler("cpu", enabled=False)
    accel = Accelerator(cpu=True, project_dir=tmp_path)
    assert accel.prepare(average, scaler) == (average, scaler)
    assert accel.training_state.schedulers == []
