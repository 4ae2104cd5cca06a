"""What an optimizer keeps besides tensors of its parameters is restored, or told to be lost."""

from __future__ import annotations

import random
import warnings
from collections import deque
from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator
from checkpoint_io import UnsupportedStateError


class Keeper(torch.optim.SGD):
    """Keeps state under names and numbers, and more than tensors of its parameters."""

    def step(self, closure=None):
        result = super().step(closure)
        own = self.state["global"]
        own["steps"] = own.get("steps", 0) + 1
        own.setdefault("sums", torch.zeros(2)).add_(1)
        self.state[("a", 1)] = deque([own["steps"], torch.ones(1)])
        self.state[700] = "a number that is no position"
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                recent = state.setdefault("recent", deque(maxlen=2))
                recent.append(parameter.detach().clone())
                state["name"] = "of a parameter"
                state["counts"] = torch.tensor([own["steps"], 1])
                state["nested"] = [deque([1], 3), ("b", {"c": deque(maxlen=0)})]
        return result


class Unsaved(torch.optim.SGD):
    """Keeps a generator, which no checkpoint holds."""

    def step(self, closure=None):
        self.state["drawn"]["by"] = random.Random(0)
        return super().step(closure)


class Stray(torch.optim.SGD):
    """Keeps state of a tensor that is in none of its groups."""

    def step(self, closure=None):
        self.state[torch.ones(3)]["x"] = 1
        return super().step(closure)


def build(folder: Path, kind: type) -> tuple:
    accel = Accelerator(cpu=True, project_dir=folder)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    return (accel, *accel.prepare(model, kind(model.parameters(), 0.1, momentum=0.9)))


def train(accel, model, optimizer, steps: int) -> None:
    for _ in range(steps):
        accel.backward(model(torch.ones(1, 2)).pow(2).sum())
        optimizer.step()
        optimizer.zero_grad()


def text_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The state with the types of its values, by key."""
    return {
        str(list(key.shape) if isinstance(key, torch.Tensor) else key): repr(value)
        for key, value in optimizer.state.items()
    }


def test_state_under_other_keys_and_in_deques_is_restored_exactly(tmp_path: Path):
    accel, model, optimizer = build(tmp_path, Keeper)
    train(accel, model, optimizer, 3)
    saved = accel.save_state()
    before = text_of(optimizer)
    train(accel, model, optimizer, 2)
    other, fresh, resumed = build(tmp_path, Keeper)
    other.load_state(saved)
    assert text_of(resumed) == before
    train(other, fresh, resumed, 2)
    assert text_of(resumed) == text_of(optimizer)
    assert torch.equal(fresh.weight, model.weight)


def test_a_key_with_the_name_of_a_parameter_is_another_one(tmp_path: Path):
    accel, model, optimizer = build(tmp_path, torch.optim.SGD)
    train(accel, model, optimizer, 1)
    optimizer.state["0.weight"] = {"momentum_buffer": 5}
    before = text_of(optimizer)
    saved = accel.save_state()
    accel.load_state(saved)
    assert text_of(optimizer) == before


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unsaved, r"Unsaved\['state'\]\['drawn'\]\['by'\] is a random\.Random"),
        (Stray, r"tensor \[3\] that is in none of its parameter groups"),
    ],
)
def test_what_cannot_be_saved_is_told_after_the_first_step(kind, message, tmp_path: Path):
    accel, model, optimizer = build(tmp_path, kind)
    with pytest.warns(UserWarning, match=message):
        train(accel, model, optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(accel, model, optimizer, 3)  # once
    with pytest.raises((UnsupportedStateError, ValueError), match=r"random|in none of its"):
        accel.save_state()


def test_what_cannot_be_saved_is_told_at_prepare():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "schedule": min}], 0.1)
    with pytest.warns(UserWarning, match=r"SGD\['param_groups'\]\[0\]\['schedule'\] is a"):
        Accelerator(cpu=True).prepare(model, optimizer)


def test_nothing_is_told_of_what_can_be_saved_or_of_an_own_state_dict(tmp_path: Path):
    class Converts(Unsaved):
        def state_dict(self):
            return {**super().state_dict(), "state": {}}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (Keeper, Converts, torch.optim.AdamW):
            accel = Accelerator(cpu=True, project_dir=tmp_path)
            model = torch.nn.Linear(2, 2)
            model, optimizer = accel.prepare(model, kind(model.parameters(), 0.1))
            train(accel, model, optimizer, 3)
            accel.save_state()
