"""Copies of prepared optimizers, schedulers and loaders, at any moment of a loop."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_callbacks import Accelerator, DataLoaderConfiguration
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.scheduler import AcceleratedScheduler


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def by_pickle(item: Any) -> Any:
    return pickle.loads(pickle.dumps(item))


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": by_pickle}


def parts(**options: Any) -> tuple:
    accel = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    data = DataLoader(TensorDataset(torch.arange(16.0).view(8, 2)), batch_size=2, shuffle=True)
    return (accel, *accel.prepare(model, optimizer, scheduler, data))


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_and_its_scheduler_are_copied_with_their_state(way):
    accel, model, optimizer, scheduler, loader = parts()
    for (batch,) in loader:
        accel.backward(model(batch).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        # Copied together, as schedulers refer to their optimizers.
        twin, schedule = (
            WAYS[way]([optimizer, scheduler])
            if way != "copy"
            else (
                copy.copy(optimizer),
                copy.copy(scheduler),
            )
        )
        assert schedule.get_last_lr() == scheduler.get_last_lr()
        assert len(twin.state) == 2
        assert isinstance(twin, torch.optim.Optimizer)
        prepared = (
            isinstance(twin, AcceleratedOptimizer),
            isinstance(schedule, AcceleratedScheduler),
        )
        assert prepared == ((False, False) if way == "pickle" else (True, True))
        inside = getattr(twin, "optimizer", twin)
        assert schedule.optimizer is inside
        assert (inside is optimizer.optimizer) == (way == "copy")
        if way != "copy":
            schedule.step()
            assert inside.param_groups[0]["lr"] == scheduler.get_last_lr()[0] / 2
            assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


@pytest.mark.parametrize("way", ["copy", "deepcopy"])
def test_a_copy_follows_the_gradient_window(way):
    accel, model, optimizer, _, loader = parts(gradient_accumulation_steps=2)
    steps = []
    for (batch,) in loader:
        with accel.accumulate(model):
            accel.backward(model(batch).sum())
            twin = WAYS[way](optimizer)
            for parameter in twin.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            before = [p.detach().clone() for p in twin.param_groups[0]["params"]]
            twin.step()
            pairs = zip(before, twin.param_groups[0]["params"], strict=True)
            steps.append(not all(torch.equal(*pair) for pair in pairs))
    assert steps == [False, True, False, True]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["map", "seeded", "stream", "skip"])
def test_a_loader_is_copied_before_within_and_after_a_pass(way, kind):
    config = DataLoaderConfiguration(seeded_order=kind == "seeded")
    accel, *_, loader = parts(dataloader_config=config)
    if kind == "stream":
        loader = accel.prepare(DataLoader(Numbers(), batch_size=2))
    if kind == "skip":
        loader = accel.skip_first_batches(loader, 1)
        if way == "copy":
            return  # a view of the same loader, with which it advances
    batches = 3 if kind == "skip" else 4

    def length_of_copy() -> int:
        return sum(1 for _ in WAYS[way](loader))

    assert length_of_copy() == batches
    seen = 0
    for _ in loader:
        seen += 1
        if seen == 2:
            assert length_of_copy() == batches
    assert seen == batches  # the copy has a position of its own
    assert length_of_copy() == batches
