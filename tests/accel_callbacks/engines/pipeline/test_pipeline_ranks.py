"""Ranks that have the same stages of a pipeline, under FSDP2: who has gradients, and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, DistributedDataParallelKwargs, ParallelismConfig
from tests.support.bound import BOUND
from tests.support.pool import Pool
from tests.support.rounding import assert_reordered

pytestmark = pytest.mark.distributed

UNUSED = {"find_unused_parameters": True}


@pytest.fixture
def fresh_pool_of_4(tmp_path: Path) -> Iterator[Pool]:
    """Four processes, whose group a test breaks."""
    fresh = Pool(4, tmp_path)
    yield fresh
    fresh.kill()


class Choice(torch.nn.Module):
    """A layer that uses the weights that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.used = "a"
        for name in ("a", "b", "spare"):
            setattr(self, name, torch.nn.Parameter(torch.randn(6, 6)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return sum(hidden @ getattr(self, name) for name in self.used)


class Stages(torch.nn.Module):
    """A model whose first stage has a buffer, and whose second one uses weights by batch."""

    def __init__(self, with_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 6)
        self.norm = torch.nn.BatchNorm1d(6) if with_norm else torch.nn.Tanh()
        self.choice = Choice()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.choice(self.norm(self.first(inputs)))


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def train(
    schedule: str | None,
    used: list[list[str]],
    handler: dict[str, Any] | None = None,
    window: int = 1,
    with_norm: bool = False,
) -> tuple[dict[str, Any], list[Any]]:
    """Train with the weights that each data rank uses in each step; return weights and buffers."""
    options: dict[str, Any] = {}
    if schedule is not None:
        options["parallelism_config"] = ParallelismConfig(pp_size=2, dp_shard_size=2)
    handlers = [DistributedDataParallelKwargs(**handler)] if handler else []
    accel = Accelerator(
        cpu=True, timeout=BOUND, kwargs_handlers=handlers,
        gradient_accumulation_steps=window, **options,
    )  # fmt: skip
    inner = Stages(with_norm)
    model: Any = inner
    if schedule is not None:
        model = accel.prepare_pipeline(
            model, ["choice"], loss_of, schedule=schedule, microbatches=4
        )
    rank = accel.process_index % 2 if schedule is None else accel.strategy.data.rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.5)
    if schedule is None:
        model = accel.prepare(model)
    optimizer = accel.prepare(optimizer)
    for number, names in enumerate(used):
        inner.choice.used = names[rank % len(names)]
        generator = torch.Generator().manual_seed(10 * number + rank)
        inputs = torch.randn(8, 5, generator=generator) + rank
        targets = inputs[:, :1].expand(8, 6)
        with accel.accumulate(model):
            if schedule is None:
                loss = loss_of(model(inputs), targets)
            else:
                loss = model(inputs, target=targets)
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    with accel.evaluate(model), torch.no_grad():
        model(torch.ones(8, 5))
    buffers = [b.tolist() for b in inner.buffers() if not b.is_meta]
    state = accel.get_state_dict(model, all_ranks=True)
    return {name: weight.tolist() for name, weight in state.items()}, buffers


STEPS = [["a", "b"], ["ab", "b"], ["a", "a"], ["b", "a"], ["ab", "ab"], ["b", "b"]]


def test_missing_gradients_are_averaged_as_zeros_as_ddp_does(pool_of_4):
    for schedule, window in (("1F1B", 1), ("GPipe", 2)):
        weights = pool_of_4.run(train, schedule, STEPS, UNUSED, window)[0][0]
        assert_reordered(weights, pool_of_4.run(train, None, STEPS, UNUSED, window)[0][0])


def test_buffers_are_those_of_the_first_rank_with_the_stage(pool_of_4):
    results = [buffers for _, buffers in pool_of_4.run(train, "1F1B", [["a"]] * 3, None, 1, True)]
    assert results[0] == results[2]
    assert results[1] == results[3] == []
    own = pool_of_4.run(train, "1F1B", [["a"]] * 3, {"broadcast_buffers": False}, 1, True)
    assert own[0][1] == results[0]
    assert own[2][1] != results[0]


def test_ranks_that_use_other_parameters_are_told_which(fresh_pool_of_4):
    outcomes = fresh_pool_of_4.outcomes(train, "1F1B", [["ab", "b"]])
    told = "'choice.a' has a gradient on rank 1 and none on rank 3"
    assert [kind for kind, _ in outcomes[1::2]] == ["RuntimeError"] * 2
    assert [kind for kind, _ in outcomes[::2]] == ["RemoteError"] * 2
    for _, text in outcomes:
        assert told in text
        assert "find_unused_parameters=True" in text
