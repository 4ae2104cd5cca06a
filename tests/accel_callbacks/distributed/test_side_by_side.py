"""Two Accelerators in each of two processes, and processes that begin again."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from accel_callbacks import Accelerator, GradientAccumulationPlugin
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


def training(model, **options):
    """Trains on one batch at each step of this generator, and yields (weight, synchronized)."""
    accel = accelerator(**options)
    model, optimizer, data = accel.prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.utils.data.DataLoader(torch.arange(8.0).reshape(8, 1), 1),
    )
    for batch in data:
        with accel.accumulate(model):
            accel.backward(model(batch).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        yield accel.unwrap_model(model).weight.item(), accel.sync_gradients


def layer() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    return model


FIRST = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}
SECOND = {"gradient_accumulation_plugin": GradientAccumulationPlugin(3, sync_each_batch=True)}


def side_by_side() -> bool:
    alone = [list(training(layer(), **options)) for options in (FIRST, SECOND)]
    together = list(zip(training(layer(), **FIRST), training(layer(), **SECOND), strict=True))
    return [list(one) for one in zip(*together, strict=True)] == alone


def test_accelerators_side_by_side_train_as_each_does_alone(pool):
    assert pool.run(side_by_side) == [True, True]


def one_model_prepared_twice() -> list:
    """The second Accelerator takes a model over that the first one, still there, has wrapped."""
    model = layer()
    first = list(training(model))
    second = list(training(model))
    fresh = layer()
    with torch.no_grad():
        fresh.weight.fill_(first[-1][0])
    return [second == list(training(fresh)), [weight for weight, _ in second]]


def test_a_model_may_be_trained_by_one_accelerator_after_another(pool):
    (same, first), (also, second) = pool.run(one_model_prepared_twice)
    assert same
    assert also
    assert first == second


def end_and_begin_again() -> list:
    before = dict(os.environ)
    found = []
    for precision in ("no", "bf16", "no"):
        accel = accelerator(mixed_precision=precision)
        weight = list(training(layer(), mixed_precision=precision))[-1][0]
        accel.end_training()
        found.append((accel.mixed_precision, round(weight, 2), dist.is_initialized()))
    return [*found, dict(os.environ) == before]


def test_processes_may_end_a_training_and_begin_another(pool):
    first, second = pool.run(end_and_begin_again)
    assert first == second
    full, half, again, same_environment = first
    assert full == again
    assert (full[0], half[0]) == ("no", "bf16")
    assert [full[2], half[2], same_environment] == [False, False, True]
