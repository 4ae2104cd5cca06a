"""Schedulers that are no LRScheduler make one step a call on two processes."""

from __future__ import annotations

import pytest
import torch

from accel_callbacks import Accelerator
from tests.accel_callbacks.loop.test_own_schedulers import Halving, Told
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def step() -> tuple[list[str], int, float]:
    accel = Accelerator(cpu=True, timeout=BOUND, scheduler_steps_per_process=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    told, halving = Told(optimizer), Halving(optimizer)
    torchs = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, told, halving, torchs = accel.prepare(model, optimizer, told, halving, torchs)
    accel.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    told.step(1)
    halving.step()
    torchs.step()
    return told.calls, halving.count, torchs.last_epoch


def test_a_step_is_not_repeated_for_each_process(pool):
    assert pool.run(step) == [(["epoch 1"], 1, 2)] * 2  # that of torch two, as asked for
