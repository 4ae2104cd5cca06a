"""Ranks that lack gradients of different parameters under DistributedDataParallel name theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, DistributedDataParallelKwargs
from accel_callbacks.engines.ddp import reduction
from tests.support.bound import BOUND
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed


@pytest.fixture
def fresh_pool(tmp_path: Path) -> Iterator[Pool]:
    """Two processes, whose group a test breaks."""
    fresh = Pool(2, tmp_path)
    yield fresh
    fresh.kill()


class Experts(torch.nn.Module):
    """A model of which a batch uses the experts that it names; each is more than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 300)
        self.experts = torch.nn.ModuleList(
            torch.nn.Linear(300, 1000 + 100 * number) for number in range(3)
        )

    def forward(self, rows: torch.Tensor, experts: tuple[int, ...]) -> torch.Tensor:
        hidden = self.inner(rows)
        return sum(self.experts[number](hidden).mean() for number in experts)


def prepared(unused: bool = False) -> tuple[Any, ...]:
    options = DistributedDataParallelKwargs(bucket_cap_mb=1, find_unused_parameters=unused)
    accel = Accelerator(cpu=True, timeout=BOUND, kwargs_handlers=[options])
    model = Experts()
    return accel, *accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))


def routed(routes: list[Any], then: str, unused: bool = False, patience: float = 600.0) -> str:
    reduction._LONGEST = patience
    accel, model, optimizer = prepared(unused)
    for route in ((0, 1, 2), (0, 1, 2)), ((0, 1, 2), (0, 1, 2)), routes, routes:
        loss = model(torch.ones(4, 8), tuple(route[accel.process_index]))
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if then == "reduce":
            accel.reduce(loss.detach(), "mean")
        if then == "gather":
            accel.gather(loss.detach())
    return "trained"


APART = [[1, 2], [0, 1]]


@pytest.mark.parametrize("then", ["reduce", "gather", "forward"])
def test_ranks_that_lack_other_gradients_name_theirs(fresh_pool, then):
    outcomes = fresh_pool.outcomes(routed, APART, then)
    for (kind, text), lacking in zip(outcomes, (0, 2), strict=True):
        assert kind == "RuntimeError"
        assert text.startswith("" if then == "forward" else f"{then}: ")
        names = f"'experts.{lacking}.weight', 'experts.{lacking}.bias' of Experts"
        assert f"{names} got no gradient in the last backward" in text
        assert "find_unused_parameters=True" in text


def test_a_rank_that_alone_lacks_some_says_so_to_the_one_that_waits(fresh_pool):
    outcomes = fresh_pool.outcomes(routed, [[0, 1, 2], [0, 1]], "reduce", False, 1.0)
    for _, text in outcomes:
        assert "'experts.2.bias' of Experts got no gradient in the last backward of rank 1" in text


def test_with_unused_parameters_they_train(pool):
    assert pool.run(routed, APART, "gather", True) == ["trained"] * 2


class Halves(torch.nn.Module):
    """A model of two losses, each of half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(rows).mean(), self.second(rows).mean()


def in_two_losses() -> float:
    """A gather between the backward passes of two losses."""
    accel = Accelerator(cpu=True, timeout=BOUND)
    model = Halves()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        first, second = model(torch.ones(2, 4))
        accel.backward(first)
        accel.gather(first.detach())
        accel.backward(second)
        optimizer.step()
        optimizer.zero_grad()
    return accel.reduce(torch.tensor(1.0)).item()


def test_a_gather_between_two_losses_is_right(pool):
    assert pool.run(in_two_losses) == [2.0, 2.0]


def train_frozen(own: bool) -> str:
    accel = Accelerator(cpu=True, timeout=BOUND)
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    if own:  # frozen before, and so not numbered by torch
        net[0].requires_grad_(False)
    model, optimizer = accel.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(3):
        if step == 1:
            net[1].requires_grad_(False)
        accel.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return "trained"


@pytest.mark.parametrize("own", [False, True])
def test_a_part_that_is_frozen_later_is_named(fresh_pool, own):
    for kind, text in fresh_pool.outcomes(train_frozen, own):
        assert kind == "RuntimeError"
        assert text.startswith("'1.weight', '1.bias' of Sequential got no gradient")
